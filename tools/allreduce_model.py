#!/usr/bin/env python3
"""Model checker of the all-reduce protocols (src/comm/oneshot.h, twoshot.h, protocol.h).

    python3 tools/allreduce_model.py            check the table; exit 0 if every verdict is expected
    python3 tools/allreduce_model.py --trace    also print the shortest counterexample of each fault

A breadth-first search over all interleavings of small configurations: ranks, CTAs of a rank, and a
sequence of calls on one workspace, one-shot, two-shot or the CPU's reference, each with a number of
tokens of its own, which have one leaf each.  Slots are packed by the tokens of a call, so that the
mapping of cells to CTAs changes between calls.  A cell holds the number of the call that wrote it.
Faults are

    overwrite   a push finds a cell that is not empty
    stale       data of another call are taken
    deadlock    nobody can move
    silent      a rank has used wrong data, or gave up, and has reported nothing at its end

Steps are atomic under sequential consistency.  Pushes to one peer, the clearing of a CTA in the
one-shot, and the parts of the reference are one step each: what others see of them is a matter of
the steps before and after.  Epochs wrap at small numbers (`wrap`, `word`), where those of the
library do at 2^32.

With `victim`, a rank stops for good before one of its steps, and waits may end by a deadline; with
`impatient`, those of one rank may, although all ranks go on.  A rank that gives up sets the abort
cells of all ranks one after another, and runs through all later calls without waiting, as in the
replay of a graph.

Every variant that a fault is expected of plants one: the table shows what each rule is for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

EMPTY = 255
PARTIAL = 254  # A sum that lacks addends.


class Call(NamedTuple):
    """One call of all ranks."""
    kind: str  # "oneshot", "twoshot" or "reference"
    tokens: int
    ctas: tuple[int, ...]  # CTAs that each rank launches.


@dataclass(frozen=True)
class Setting:
    """One line of the table; the defaults are the rules of the library."""
    name: str
    ranks: int
    calls: tuple[Call, ...]
    expect: str = "ok"  # Or "bad": any fault.
    buffers: int = 3
    first_epoch: int = 0  # One-shot and two-shot start here, barriers at thrice this number.
    wrap: int = 9  # One-shot epochs count modulo this, a multiple of the buffers.
    word: int = 16  # Two-shot epochs and barriers count modulo this.
    stagings: int = 2  # Staging areas of the two-shot.
    chunk: int = 100  # Tokens that the two-shot exchanges at a time, a multiple of the ranks.
    empties: bool = True  # Whoever takes a leaf of the two-shot empties its cell.
    sends_partial: bool = False  # A CTA that has given up sends what it has of a sum.
    flag_rule: str = "window"  # "signed": every flag less than half a cycle ahead has arrived.
    clear_rule: str = "buffers"  # "word": (epoch + 2) of a word that holds wrap + 1 numbers.
    clears: str = "previous"  # "present": the size of the present call.
    shared_epoch: bool = False  # One counter for both protocols.
    polls: str = "own"  # "peer": the copy of the rank that pushed.
    overlap: bool = False  # The next call of a CTA begins when this CTA is done.
    barriers: tuple[bool, bool, bool] = (True, True, True)
    victim: tuple[int, int] | None = None  # Rank, and the step before which it stops.
    impatient: int | None = None
    deadlines: bool = True
    entry: str = "reports"  # "silent": a CTA that sees an abort cell at its entry tells nobody.


@dataclass
class Step:
    """A step of a CTA: the conditions to take it and its effects."""
    label: str
    call: int
    begins: bool = False  # The first of its call.
    takes: tuple[int, ...] = ()  # Waits until these cells are not empty; then they hold `call`.
    flags: tuple[int, ...] = ()  # Waits until these flags have arrived at `epoch`.
    epoch: int = 0
    reads: tuple[int, ...] = ()  # Cells that must hold `call`.
    pushes: tuple[int, ...] = ()  # Empty cells that get `call`.
    stores: tuple[int, ...] = ()  # Cells that get `value`, whatever they hold.
    value: int = 0
    needs_data: bool = False  # Does nothing in a CTA that has given up.
    is_sum: bool = False


@dataclass
class Memory:
    """Numbers of cells, by name."""
    names: dict[tuple, int] = field(default_factory=dict)

    def cell(self, *name) -> int:
        return self.names.setdefault(name, len(self.names))


def token_range(tokens: int, ranks: int, rank: int) -> range:
    least, more = divmod(tokens, ranks)
    first = rank * least + min(rank, more)
    return range(first, first + least + (rank < more))


class Program:
    """The steps of all CTAs, and the initial memory."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.memory = Memory()
        most = max(max(call.ctas) for call in setting.calls)
        self.owners = [(r, c) for r in range(setting.ranks) for c in range(most)]
        self.steps = [self.cta_steps(r, c) for r, c in self.owners]
        self.initial = bytearray([EMPTY] * len(self.memory.names))
        for name, cell in self.memory.names.items():
            if name[0] == "flag":
                self.initial[cell] = 3 * setting.first_epoch % setting.word

    def cta_steps(self, rank: int, cta: int) -> list[Step]:
        steps: list[Step] = []
        made = {"oneshot": 0, "twoshot": 0, "reference": 0}
        previous = 0
        for number, call in enumerate(self.setting.calls):
            new: list[Step] = []
            if cta < call.ctas[rank] and call.kind == "oneshot":
                count = number if self.setting.shared_epoch else made["oneshot"]
                new = self.oneshot(rank, cta, number, count, previous)
            elif cta < call.ctas[rank] and call.kind == "twoshot":
                new = self.twoshot(rank, cta, number, made["twoshot"])
            elif cta < call.ctas[rank]:
                new = self.reference(rank, cta, number, made["reference"])
            else:
                new = [Step(f"rank {rank} cta {cta} call {number}: not launched", number)]
            new[0].begins = True
            steps += new
            made[call.kind] += 1
            if call.kind == "oneshot":
                previous = call.tokens
        return steps

    def oneshot(self, rank, cta, number, count, previous) -> list[Step]:
        s = self.setting
        call = s.calls[number]
        ctas = call.ctas[rank]
        epoch = (s.first_epoch + count) % s.wrap
        present = epoch % s.buffers
        old = (present + s.buffers - 1) % s.buffers
        if s.clear_rule == "word":
            old = (epoch + 2) % (s.wrap + 1) % s.buffers
        tokens = range(cta, call.tokens, ctas)
        peers = [p for p in range(s.ranks) if p != rank]
        title = f"rank {rank} cta {cta} call {number}:"

        def cell(owner, buffer, slot, token):
            return self.memory.cell("oneshot", owner, buffer, slot * call.tokens + token)

        steps = [Step(f"{title} push to {p}", number, value=number,
                      pushes=tuple(cell(p, present, rank, t) for t in tokens)) for p in peers]
        cleared = s.ranks * (previous if s.clears == "previous" else call.tokens)
        if number > 0:
            steps.append(Step(f"{title} clear buffer {old}", number, value=EMPTY,
                              stores=tuple(self.memory.cell("oneshot", rank, old, i)
                                           for i in range(cta, cleared, ctas))))
        for token in tokens:
            for p in peers:
                owner = rank if s.polls == "own" else p
                steps.append(Step(f"{title} poll slot {p} token {token}", number,
                                  takes=(cell(owner, present, p, token),)))
        return steps or [Step(f"{title} no token", number)]

    def staged(self, owner: int, area: int, place: int) -> int:
        return self.memory.cell("staging", owner, area, place)

    def twoshot(self, rank, cta, number, count) -> list[Step]:
        s = self.setting
        call = s.calls[number]
        ctas = call.ctas[rank]
        area = (s.first_epoch + count) % s.word % s.stagings
        peers = [p for p in range(s.ranks) if p != rank]
        title = f"rank {rank} cta {cta} call {number}:"

        def range_of(begin, owner):
            size = min(s.chunk, call.tokens - begin)
            return [begin + t for t in token_range(size, s.ranks, owner)]

        def slot(begin, owner, source, i):
            return self.staged(owner, area, begin + source * len(range_of(begin, owner)) + i)

        def take(what, cells):
            steps = [Step(f"{title} take {what}", number, takes=cells)]
            if s.empties:
                steps.append(Step(f"{title} empty {what}", number, stores=cells, value=EMPTY,
                                  needs_data=True))
            return steps

        def push(begin):
            return [Step(f"{title} push {begin} to {p}", number, value=number,
                         pushes=tuple(slot(begin, p, rank, i)
                                      for i in range(cta, len(range_of(begin, p)), ctas)))
                    for p in peers]

        def reduce(begin):
            own = range_of(begin, rank)
            for i in range(cta, len(own), ctas):
                taking, *emptying = take(f"addends {own[i]}",
                                         tuple(slot(begin, rank, p, i) for p in peers))
                sums = [Step(f"{title} send sum {own[i]} to {p}", number, value=number,
                             needs_data=not s.sends_partial, is_sum=True,
                             pushes=(self.memory.cell("result", p, own[i]),))
                        for p in range(s.ranks)]
                yield from [taking, *sums, *emptying]

        def finish(begin):
            for token in range(begin, min(begin + s.chunk, call.tokens)):
                if token % ctas == cta:
                    yield from take(f"sum of token {token}",
                                    (self.memory.cell("result", rank, token),))

        begins = range(0, call.tokens, s.chunk)
        steps = push(0)
        for begin in begins:
            if begin + s.chunk < call.tokens:
                steps += push(begin + s.chunk)
            steps += [*reduce(begin), *finish(begin)]
        return steps

    def reference(self, rank, cta, number, count) -> list[Step]:
        s = self.setting
        call = s.calls[number]
        ranks = range(s.ranks)
        title = f"rank {rank} cta {cta} call {number}:"
        epoch = 3 * (s.first_epoch + count)

        def barrier(which):
            if not s.barriers[which]:
                return []
            at = (epoch + 1 + which) % s.word
            mine = tuple(self.memory.cell("flag", peer, cta, rank) for peer in ranks)
            theirs = tuple(self.memory.cell("flag", rank, cta, peer) for peer in ranks)
            return [Step(f"{title} arrive {which}", number, stores=mine, value=at),
                    Step(f"{title} wait {which}", number, flags=theirs, epoch=at)]

        tokens = range(cta, call.tokens, call.ctas[rank])
        mine = tuple(self.staged(rank, 0, t) for t in tokens)
        read = tuple(self.staged(p, 0, t) for p in ranks for t in tokens)
        return [Step(f"{title} stage", number, stores=mine, value=number), *barrier(0),
                Step(f"{title} read", number, reads=read), *barrier(1),
                Step(f"{title} empty", number, stores=mine, value=EMPTY, needs_data=True),
                *barrier(2)]


class State(NamedTuple):
    places: bytes  # The next step of each CTA.
    memory: bytes
    aborted: int = 0  # Bits: CTAs that have given up.
    telling: tuple[tuple[int, int], ...] = ()  # CTAs that set abort cells, and the next rank.
    cells: int = 0  # Bits: abort cells of ranks.
    reported: int = 0  # Bits: ranks with a fault.
    wrong: int = 0  # Bits: ranks that used wrong data.


class Checker:
    def __init__(self, setting: Setting):
        self.setting = setting
        self.program = Program(setting)
        # For each CTA and call: where its steps begin.
        self.begins = [{step.call: i for i, step in reversed(list(enumerate(steps)))}
                       for steps in self.program.steps]

    def is_over(self, state: State, cta: int) -> bool:
        place = state.places[cta]
        rank = self.program.owners[cta][0]
        is_dead = self.setting.victim is not None and self.setting.victim == (rank, place)
        return is_dead or place >= len(self.program.steps[cta])

    def is_late(self, rank: int) -> bool:
        """Whether a wait of the rank may end by its deadline."""
        s = self.setting
        return s.impatient == rank or (s.victim is not None and s.deadlines)

    def has_arrived(self, flag: int, epoch: int) -> bool:
        ahead = (flag - epoch) % self.setting.word
        return ahead <= 1 if self.setting.flag_rule == "window" else ahead < self.setting.word // 2

    def may_begin(self, state: State, cta: int, call: int) -> bool:
        """The kernel boundary: all CTAs of the rank have ended the call before."""
        rank = self.program.owners[cta][0]
        return self.setting.overlap or all(
            state.places[other] >= self.begins[other][call]
            for other, (r, _) in enumerate(self.program.owners) if r == rank)

    @staticmethod
    def give_up(state: State, cta: int, rank: int) -> State:
        return state._replace(aborted=state.aborted | 1 << cta, reported=state.reported | 1 << rank,
                              wrong=state.wrong | 1 << rank, telling=state.telling + ((cta, 0),))

    def successors(self, state: State):
        """Yields (label, state, fault)."""
        s = self.setting
        busy = {cta for cta, _ in state.telling}
        for cta, peer in state.telling:
            rest = tuple(t for t in state.telling if t[0] != cta)
            telling = rest if peer + 1 == s.ranks else tuple(sorted(rest + ((cta, peer + 1),)))
            yield (f"cta {cta} sets the abort cell of rank {peer}",
                   state._replace(cells=state.cells | 1 << peer, telling=telling), None)
        for cta, steps in enumerate(self.program.steps):
            if cta in busy or self.is_over(state, cta):
                continue
            rank = self.program.owners[cta][0]
            step = steps[state.places[cta]]
            bit = 1 << cta
            if step.begins:
                if not self.may_begin(state, cta, step.call):
                    continue
                if state.cells >> rank & 1 and not state.aborted & bit:
                    reported = 1 << rank if s.entry == "reports" else 0
                    yield f"{step.label}, aborted at entry", state._replace(
                        aborted=state.aborted | bit, wrong=state.wrong | 1 << rank,
                        reported=state.reported | reported), None
                    continue
            is_aborted = bool(state.aborted & bit)
            is_ready = (all(state.memory[c] != EMPTY for c in step.takes) and
                        all(self.has_arrived(state.memory[f], step.epoch) for f in step.flags))
            if not is_ready and not is_aborted:
                if state.cells >> rank & 1:
                    yield f"{step.label}, aborted", self.give_up(state, cta, rank), None
                elif self.is_late(rank):
                    yield f"{step.label}, too late", self.give_up(state, cta, rank), None
                continue
            wrong = any(state.memory[c] != step.call for c in step.takes + step.reads)
            if s.victim is None and s.impatient is None:
                if wrong:
                    yield step.label, None, "stale"
                    return
                if any(state.memory[c] != EMPTY for c in step.pushes):
                    yield step.label, None, "overwrite"
                    return
            memory = state.memory
            if (step.stores or step.pushes) and not (is_aborted and step.needs_data):
                changed = bytearray(memory)
                is_partial = is_aborted and step.is_sum
                for c in step.stores + step.pushes:
                    changed[c] = PARTIAL if is_partial else step.value
                memory = bytes(changed)
            places = bytearray(state.places)
            places[cta] += 1
            yield step.label, state._replace(
                places=bytes(places), memory=memory,
                wrong=state.wrong | (1 << rank if wrong else 0)), None

    def run(self):
        """Returns the number of states, the verdict and the labels of a shortest counterexample."""
        initial = State(bytes(len(self.program.steps)), bytes(self.program.initial))
        parent: dict[State, tuple[State, str] | None] = {initial: None}
        queue = deque([initial])

        def path(state, last=None):
            labels = [last] if last else []
            while (link := parent[state]) is not None:
                state, label = link
                labels.append(label)
            return labels[::-1]

        while queue:
            state = queue.popleft()
            moved = False
            for label, new, fault in self.successors(state):
                if fault:
                    return len(parent), fault, path(state, label)
                moved = True
                if new not in parent:
                    parent[new] = (state, label)
                    queue.append(new)
            if moved:
                continue
            if not all(self.is_over(state, cta) for cta in range(len(self.program.steps))):
                return len(parent), "deadlock", path(state)
            victim = self.setting.victim
            alive = ~(1 << victim[0]) if victim else ~0
            if state.wrong & ~state.reported & alive:
                return len(parent), "silent", path(state)
        return len(parent), "ok", []


def calls(ranks: int, *specs: str) -> tuple[Call, ...]:
    """"o2x3": a one-shot of 2 tokens on 3 CTAs a rank; "t1x2,1": a two-shot, ranks with 2 and 1
    CTAs; "r1x1": the reference."""
    kinds = {"o": "oneshot", "t": "twoshot", "r": "reference"}
    result = []
    for spec in specs:
        tokens, grid = spec[1:].split("x")
        ctas = tuple(int(c) for c in grid.split(","))
        result.append(Call(kinds[spec[0]], int(tokens),
                           ctas * ranks if len(ctas) == 1 else ctas))
    return tuple(result)


def table() -> list[Setting]:
    def rows(ranks, *specs):
        return {"ranks": ranks, "calls": calls(ranks, *specs)}

    mixed = ("o1x1", "t2x1", "o2x1", "t1x1", "o1x1", "o2x1")
    lonely = ("r4x2", *["r1x1"] * 3, "r4x2")
    varied = ("o3x2", "o1x2", "o2x2", "o3x2", "o1x2")
    dying = rows(3, *["o1x1"] * 3)
    return [
        Setting("one-shot", **rows(2, *["o1x1"] * 7)),
        Setting("one-shot, 3 ranks", **rows(3, *["o1x1"] * 4)),
        Setting("one-shot, tokens vary", **rows(2, "o1x1", "o3x1", "o2x1", "o1x1", "o3x1", "o1x1")),
        Setting("one-shot, 3 ranks, tokens vary",
                **rows(3, "o1x1", "o2x1", "o1x1", "o2x1", "o1x1")),
        Setting("one-shot, tokens and CTAs vary",
                **rows(2, "o3x2", "o1x2", "o4x3", "o2x1", "o3x2", "o1x2")),
        Setting("one-shot, tokens vary, two CTAs", **rows(2, *varied)),
        Setting("one-shot, other grids", **rows(2, "o2x2,1", "o1x1,2", "o2x1,2")),
        Setting("one-shot, epochs wrap", first_epoch=4, wrap=6, **rows(2, *["o1x1"] * 6)),
        Setting("two-shot", **rows(2, *["t2x1"] * 4)),
        Setting("two-shot, one token", **rows(2, *["t1x1"] * 6)),
        Setting("two-shot, 3 ranks", **rows(3, "t1x1", "t2x1", "t1x1", "t1x1")),
        Setting("two-shot, tokens vary", **rows(2, "t2x1", "t1x1", "t3x1", "t1x1", "t2x1")),
        Setting("two-shot, tokens and CTAs vary", **rows(2, "t2x2", "t1x2", "t3x2", "t2x1")),
        Setting("two-shot in chunks", chunk=2, **rows(2, "t4x1", "t3x1", "t5x1")),
        Setting("two-shot in chunks, two CTAs", chunk=2, **rows(2, "t4x2", "t3x2")),
        Setting("two-shot in chunks, 3 ranks", chunk=3, **rows(3, "t4x1")),
        Setting("two-shot, other grids", **rows(2, "t2x2,1", "t1x1,2", "t2x1,2")),
        Setting("two-shot, epochs wrap", first_epoch=13, word=16, **rows(2, *["t2x1"] * 4)),
        Setting("reference", **rows(2, *["r2x1"] * 3)),
        Setting("reference, 3 ranks", **rows(3, "r2x1", "r1x1")),
        Setting("reference, epochs wrap", first_epoch=4, word=16, **rows(2, *["r2x1"] * 4)),
        Setting("reference, a CTA not launched for long", **rows(2, *lonely)),
        Setting("two-shot and reference",
                **rows(2, "t2x1", "r2x1", "t2x1", "t1x1", "r1x1", "t2x1")),
        Setting("two-shot and reference, odd", **rows(2, "t2x1", "t1x1", "r2x1", "t2x1", "r1x1")),
        Setting("both protocols", **rows(2, *mixed)),
        Setting("both protocols, CTAs vary",
                **rows(2, "o3x2", "t4x2", "o1x2", "t3x1", "o2x2", "t4x2", "o3x3")),
        Setting("both protocols, 3 ranks", **rows(3, "o1x1", "t2x1", "o2x1", "t3x1", "o1x1")),
        # Planted faults.
        Setting("two buffers", expect="bad", buffers=2, wrap=8, **rows(2, *["o1x1"] * 6)),
        Setting("polls the peer's copy", expect="bad", polls="peer", **rows(2, *["o1x1"] * 6)),
        Setting("calls overlap", expect="bad", overlap=True, **rows(2, *varied)),
        Setting("five buffers, calls overlap", expect="bad", overlap=True, buffers=5, wrap=10,
                **rows(2, *varied, "o2x2", "o3x2")),
        Setting("clears the size of the present call", expect="bad", clears="present",
                **rows(2, "o3x1", "o1x1", "o1x1", "o3x1", "o3x1")),
        Setting("wraps at no multiple of the buffers", expect="bad", wrap=7, first_epoch=5,
                **rows(2, *["o1x1"] * 6)),
        Setting("adds to the epoch before it takes the rest", expect="bad", clear_rule="word",
                wrap=6, first_epoch=4, **rows(2, *["o1x1"] * 6)),
        Setting("one epoch for both protocols", expect="bad", shared_epoch=True,
                **rows(2, "o1x1", "t1x1", "o1x1", "o1x1", "o1x1", "o1x1")),
        Setting("one staging area", expect="bad", stagings=1, **rows(2, *["t2x1"] * 4)),
        Setting("cells of the two-shot stay full", expect="bad", empties=False,
                **rows(2, *["t2x1"] * 3)),
        Setting("two-shot calls overlap", expect="bad", overlap=True,
                **rows(2, "t2x2", "t1x2", "t3x2", "t2x2")),
        Setting("sums that lack an addend", expect="bad", sends_partial=True, victim=(2, 0),
                **rows(3, "t1x1")),
        Setting("no first barrier", expect="bad", barriers=(False, True, True),
                **rows(2, *["r2x1"] * 3)),
        Setting("no second barrier", expect="bad", barriers=(True, False, True),
                **rows(2, *["r2x1"] * 3)),
        Setting("no third barrier", expect="bad", barriers=(True, True, False),
                **rows(2, "r2x1", "t2x1", "t2x1")),
        Setting("reference with other grids", expect="bad", **rows(2, *["r4x2,1"] * 2)),
        Setting("an old flag counts as ahead", expect="bad", flag_rule="signed",
                **rows(2, *lonely)),
        # A rank that stops: before its push, among its polls, in its second call, at a barrier.
        *[Setting(f"one-shot, a rank dies at step {at}", victim=(2, at), **dying)
          for at in range(10)],
        *[Setting(f"two-shot, a rank dies at step {at}", victim=(1, at),
                  **rows(2, *["t2x1"] * 3)) for at in range(12)],
        *[Setting(f"two-shot, a rank of 3 dies at step {at}", victim=(1, at),
                  **rows(3, "t2x1", "t1x1")) for at in range(0, 9, 2)],
        *[Setting(f"reference, a rank dies at step {at}", victim=(1, at),
                  **rows(2, *["r2x1"] * 2)) for at in range(9)],
        *[Setting(f"both protocols, a rank dies at step {at}", victim=(1, at),
                  **rows(2, "o1x1", "t2x1", "o2x1")) for at in (0, 1, 4, 8)],
        Setting("a rank gives up early", impatient=0, **rows(2, *["o1x1"] * 5)),
        Setting("a rank gives up early in both protocols", impatient=0, **rows(2, *mixed)),
        Setting("a rank of 3 gives up early", impatient=0, **dying),
        Setting("dies without deadlines", expect="bad", victim=(2, 1), deadlines=False, **dying),
        Setting("gives up, an entry tells nobody", expect="bad", impatient=0, entry="silent",
                **rows(2, *["o1x1"] * 5)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="model check of the all-reduce protocols")
    parser.add_argument("--trace", action="store_true", help="print shortest counterexamples")
    parser.add_argument("--only", default="", help="settings whose name contains this text")
    arguments = parser.parse_args()
    failed = 0
    for setting in table():
        if arguments.only not in setting.name:
            continue
        start = time.monotonic()
        states, verdict, trace = Checker(setting).run()
        is_expected = (verdict == "ok") == (setting.expect == "ok")
        failed += not is_expected
        print(f"{'pass' if is_expected else 'FAIL'}  {setting.name:46} {verdict:9} "
              f"{states:8} states {time.monotonic() - start:5.1f} s", flush=True)
        for line in trace if arguments.trace else []:
            print("        " + line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
