// The C API from Rust, without bindgen: the structs of narrowfloat_c.h as Rust sees them. Prints the
// bytes of one quantized block, or the library's error.
use std::ffi::{c_char, c_void, CStr};
use std::ptr::{null, null_mut};

#[repr(C)]
struct NfTensor {
    data: *mut c_void,
    dtype: *const c_char,
    device: i32,
    rank: i32,
    shape: [i64; 4],
    strides: [i64; 4],
}

#[repr(C)]
struct NfQuantized {
    struct_size: u32,
    device: i32,
    format: *const c_char,
    layout: *const c_char,
    batch: i64,
    rows: i64,
    cols: i64,
    alignment: i64,
    value_cols: i64,
    values_bytes: i64,
    scales_bytes: i64,
    global_scales: i64,
    values: *mut c_void,
    scales: *mut c_void,
    global_scale: *mut f32,
}

#[link(name = "narrowfloat")]
extern "C" {
    fn nf_last_error() -> *const c_char;
    fn nf_quantized_sizes(quantized: *mut NfQuantized) -> i32;
    fn nf_quantize(
        input: *const NfTensor,
        output: *const NfQuantized,
        options: *const c_void,
        stream: *mut c_void,
    ) -> i32;
}

fn check(status: i32) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    let text = unsafe { CStr::from_ptr(nf_last_error()) };
    Err(format!("status {}: {}", status, text.to_string_lossy()))
}

fn quantize(format: &CStr) -> Result<String, String> {
    let magnitudes = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let mut input: Vec<f32> = (0..32)
        .map(|i| magnitudes[i % 8] * if i / 8 % 2 == 0 { 4.0 } else { -4.0 })
        .collect();
    let mut quantized = NfQuantized {
        struct_size: std::mem::size_of::<NfQuantized>() as u32,
        device: -1,
        format: format.as_ptr(),
        layout: b"linear\0".as_ptr() as *const c_char,
        batch: 1,
        rows: 1,
        cols: 32,
        alignment: 0,
        value_cols: 0,
        values_bytes: 0,
        scales_bytes: 0,
        global_scales: 0,
        values: null_mut(),
        scales: null_mut(),
        global_scale: null_mut(),
    };
    check(unsafe { nf_quantized_sizes(&mut quantized) })?;
    let mut values = vec![0u8; quantized.values_bytes as usize];
    let mut scales = vec![0u8; quantized.scales_bytes as usize];
    quantized.values = values.as_mut_ptr() as *mut c_void;
    quantized.scales = scales.as_mut_ptr() as *mut c_void;
    let tensor = NfTensor {
        data: input.as_mut_ptr() as *mut c_void,
        dtype: b"F32\0".as_ptr() as *const c_char,
        device: -1,
        rank: 2,
        shape: [1, 32, 0, 0],
        strides: [0; 4],
    };
    check(unsafe { nf_quantize(&tensor, &quantized, null(), null_mut()) })?;
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{:02x}", b)).collect::<String>();
    Ok(format!("{} {}", hex(&values), hex(&scales)))
}

fn main() {
    for format in [&b"mxfp4\0"[..], &b"mxfp5\0"[..]] {
        match quantize(CStr::from_bytes_with_nul(format).unwrap()) {
            Ok(text) => println!("{}", text),
            Err(text) => println!("{}", text),
        }
    }
}
