// The files of the file bootstrap: which stay, which meet.
#include "runtime/comm/file_bootstrap.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>

#include "narrowfloat/bootstrap.h"
#include "narrowfloat/error.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"
#include "unit/runtime/comm/rank_processes.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

// Some collectives among the ranks of a job; returns its texts.
std::string texts_of(const std::string& directory, const RankInfo& info) {
  const auto bootstrap = make_file_bootstrap(directory, info, kLongDeadline);
  bootstrap->barrier();
  std::string all;
  for (const std::string& text : bootstrap->gather_texts(info.job_id)) all += text + " ";
  return all;
}

TEST(FileBootstrap, LeavesNothingWhenAllHaveEnded) {
  const TempDir dir;
  for (const int size : {1, 2, 8}) {
    run_processes(size,
                  [&](int rank) { return texts_of(dir.path(), place_in_job(rank, size, "a")); });
    EXPECT_TRUE(names_in(dir.path()).empty()) << ::testing::PrintToString(names_in(dir.path()));
  }
}

TEST(FileBootstrap, LeavesNothingWhenARankNeverCame) {
  const TempDir dir;
  run_processes(2, [&](int rank) {
    return error_of(
        [&] { make_file_bootstrap(dir.path(), place_in_job(rank, 3, "a"), milliseconds(100)); });
  });
  EXPECT_TRUE(names_in(dir.path()).empty()) << ::testing::PrintToString(names_in(dir.path()));
}

// A fast rank begins the next meeting while a slow one has not seen that the last one is over.
TEST(FileBootstrap, GroupsOfAJobFollowEachOtherAtOnce) {
  const TempDir dir;
  constexpr int kGroups = 8;
  const std::vector<std::string> results = run_processes(4, [&](int rank) {
    std::vector<std::unique_ptr<Bootstrap>> groups;
    for (int group = 0; group < kGroups; ++group) {
      groups.push_back(make_file_bootstrap(dir.path(), place_in_job(rank, 4, "a"), kLongDeadline));
    }
    std::string all;
    for (const auto& group : groups) {
      for (const std::string& text : group->gather_texts(std::to_string(rank))) all += text;
    }
    return all;
  });
  for (const std::string& result : results) EXPECT_EQ(result, "01230123012301230123012301230123");
  EXPECT_TRUE(names_in(dir.path()).empty()) << ::testing::PrintToString(names_in(dir.path()));
}

TEST(FileBootstrap, JobsInOneDirectoryDoNotMeet) {
  const TempDir dir;
  // The names of the last two are the same but for the hash.
  const std::vector<std::string> jobs = {"job one", "job/two", "job_two"};
  const std::vector<std::string> results = run_processes(6, [&](int process) {
    const std::string& job = jobs[static_cast<size_t>(process / 2)];
    return texts_of(dir.path(), place_in_job(process % 2, 2, job));
  });
  for (size_t process = 0; process < 6; ++process) {
    EXPECT_EQ(results[process], jobs[process / 2] + " " + jobs[process / 2] + " ");
  }
  EXPECT_TRUE(names_in(dir.path()).empty());
}

TEST(FileBootstrap, MeetsDespiteTheFilesOfACrashedJob) {
  const TempDir dir;
  // Killed with a message in flight.
  run_processes(3, [&](int rank) -> std::string {
    const auto bootstrap = make_file_bootstrap(dir.path(), place_in_job(rank, 3, "a"));
    bootstrap->barrier();
    std::raise(SIGKILL);
    return {};
  });
  // Killed while it waits for the others.
  run_processes(1, [&](int) -> std::string {
    std::thread([] {
      std::this_thread::sleep_for(milliseconds(50));
      ::kill(::getpid(), SIGKILL);
    }).detach();
    make_file_bootstrap(dir.path(), place_in_job(1, 3, "a"));
    return {};
  });
  const size_t stale = names_in(dir.path()).size();
  EXPECT_GE(stale, 4U);
  const std::vector<std::string> results = run_processes(3, [&](int rank) {
    // The others see its old file first.
    if (rank == 1) std::this_thread::sleep_for(milliseconds(60));
    return texts_of(dir.path(), place_in_job(rank, 3, "a"));
  });
  for (const std::string& result : results) EXPECT_EQ(result, "a a a ");
  EXPECT_EQ(names_in(dir.path()).size(), stale - 1)
      << "all but the file of rank 1 that was replaced";
}

TEST(FileBootstrap, SaysThatASizeDiffers) {
  const TempDir dir;
  const std::vector<std::string> results = run_processes(2, [&](int rank) {
    return error_of([&] {
      make_file_bootstrap(dir.path(), place_in_job(rank, rank == 0 ? 2 : 3, "a"),
                          milliseconds(150));
    });
  });
  EXPECT_NE(results[0].find("device error"), std::string::npos) << results[0];
  EXPECT_NE(results[0].find("waited 150 ms for rank 1"), std::string::npos) << results[0];
  EXPECT_NE(results[0].find("size 3"), std::string::npos) << results[0];
  EXPECT_NE(results[0].find("expected size 2"), std::string::npos) << results[0];
}

TEST(FileBootstrap, NeedsADirectory) {
  const TempDir dir;
  std::ofstream(dir / "file") << "x";
  for (const char* name : {"file", "missing"}) {
    expect_error(ErrorKind::kIo, {"directory", name}, [&] {
      static_cast<void>(make_file_bootstrap(dir / name, place_in_job(0, 1, "a")));
    });
  }
}

TEST(JobFileBootstrap, MakesAndRemovesItsDirectory) {
  const TempDir dir;
  const std::vector<std::string> results = run_processes(3, [&](int rank) {
    const auto bootstrap =
        make_job_file_bootstrap(dir.path(), place_in_job(rank, 3, "run.0"), kLongDeadline);
    const std::vector<std::string> names = names_in(dir.path());
    bootstrap->barrier();
    return names.size() == 1 ? names[0] : "no single directory";
  });
  EXPECT_EQ(results[0].rfind("narrowfloat-", 0), 0U) << results[0];
  EXPECT_NE(results[0].find("-run_0-"), std::string::npos) << results[0];
  EXPECT_EQ(results[1], results[0]);
  EXPECT_TRUE(names_in(dir.path()).empty());
}

}  // namespace
}  // namespace narrowfloat::testing
