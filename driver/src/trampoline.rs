//! Defines the driver's functions as jumps through a table that the first call fills.

use std::arch::{global_asm, naked_asm};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// `CUDA_ERROR_NO_DEVICE`, also what a driver says that finds no GPU.
const NO_DEVICE: c_int = 100;
/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: c_int = 500;

// The symbols are hidden: a shared library that contains this crate must not offer them in the driver's place.
#[cfg(target_arch = "x86_64")]
macro_rules! define {
    ($($name:ident)*) => {
        global_asm!(
            ".pushsection .data.cuda_driver_slots,\"aw\",@progbits",
            ".balign 8",
            ".hidden cuda_driver_slots",
            ".globl cuda_driver_slots",
            "cuda_driver_slots:",
            $(concat!(".Lcuda_driver_slot_", stringify!($name), ": .quad 0"),)*
            ".popsection",
            ".pushsection .text.cuda_driver,\"ax\",@progbits",
            $(
                concat!(".globl ", stringify!($name)),
                concat!(".hidden ", stringify!($name)),
                concat!(".type ", stringify!($name), ",@function"),
                ".balign 16",
                concat!(stringify!($name), ":"),
                concat!("mov r11, qword ptr [rip + .Lcuda_driver_slot_", stringify!($name), "]"),
                "test r11, r11",
                "jnz 2f",
                "call {fill}",
                concat!("mov r11, qword ptr [rip + .Lcuda_driver_slot_", stringify!($name), "]"),
                "2: jmp r11",
                concat!(".size ", stringify!($name), ", . - ", stringify!($name)),
            )*
            ".popsection",
            fill = sym fill_keeping_arguments,
        );
        const NAMES: &[&std::ffi::CStr] = &[$(cstr(concat!(stringify!($name), "\0"))),*];
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! define {
    ($($name:ident)*) => {
        global_asm!(
            ".pushsection .data.cuda_driver_slots,\"aw\",@progbits",
            ".balign 8",
            ".hidden cuda_driver_slots",
            ".globl cuda_driver_slots",
            "cuda_driver_slots:",
            $(concat!(".Lcuda_driver_slot_", stringify!($name), ": .quad 0"),)*
            ".popsection",
            ".pushsection .text.cuda_driver,\"ax\",@progbits",
            $(
                concat!(".globl ", stringify!($name)),
                concat!(".hidden ", stringify!($name)),
                concat!(".type ", stringify!($name), ",@function"),
                ".balign 16",
                concat!(stringify!($name), ":"),
                concat!("adrp x16, .Lcuda_driver_slot_", stringify!($name)),
                concat!("add x16, x16, :lo12:.Lcuda_driver_slot_", stringify!($name)),
                "ldar x17, [x16]",
                "cbnz x17, 2f",
                "stp x16, x30, [sp, #-16]!",
                "bl {fill}",
                "ldp x16, x30, [sp], #16",
                "ldar x17, [x16]",
                "2: br x17",
                concat!(".size ", stringify!($name), ", . - ", stringify!($name)),
            )*
            ".popsection",
            fill = sym fill_keeping_arguments,
        );
        const NAMES: &[&std::ffi::CStr] = &[$(cstr(concat!(stringify!($name), "\0"))),*];
    };
}

const fn cstr(text: &str) -> &std::ffi::CStr {
    match std::ffi::CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a symbol name holds no NUL"),
    }
}

crate::names::driver_functions!(define);

unsafe extern "C" {
    /// One slot per name, in the order of the names.
    static cuda_driver_slots: [AtomicPtr<c_void>; NAMES.len()];
    fn cuInit();
}

/// Makes rustc's list of symbols that an executable needs, and so the linker, take the object with the trampolines,
/// wherever this crate stands on the command line.
#[used]
#[unsafe(no_mangle)]
static CUDA_DRIVER_TRAMPOLINES: unsafe extern "C" fn() = cuInit;

/// Calls [`fill`] and leaves every register that can carry an argument as it was.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn fill_keeping_arguments() {
    // Two return addresses and six registers: the stack is aligned to 16 again before the call.
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 128",
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "movups [rsp + 32], xmm2",
        "movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4",
        "movups [rsp + 80], xmm5",
        "movups [rsp + 96], xmm6",
        "movups [rsp + 112], xmm7",
        "call {fill}",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]",
        "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]",
        "movups xmm7, [rsp + 112]",
        "add rsp, 128",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "ret",
        fill = sym fill,
    )
}

/// Calls [`fill`] and leaves every register that can carry an argument as it was.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn fill_keeping_arguments() {
    naked_asm!(
        "stp x29, x30, [sp, #-224]!",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "str x8, [sp, #80]",
        "stp q0, q1, [sp, #96]",
        "stp q2, q3, [sp, #128]",
        "stp q4, q5, [sp, #160]",
        "stp q6, q7, [sp, #192]",
        "bl {fill}",
        "ldp q6, q7, [sp, #192]",
        "ldp q4, q5, [sp, #160]",
        "ldp q2, q3, [sp, #128]",
        "ldp q0, q1, [sp, #96]",
        "ldr x8, [sp, #80]",
        "ldp x6, x7, [sp, #64]",
        "ldp x4, x5, [sp, #48]",
        "ldp x2, x3, [sp, #32]",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #224",
        "ret",
        fill = sym fill,
    )
}

/// Fills every slot: with the driver's function, or with one that returns an error. Threads that race write the same.
extern "C" fn fill() {
    let library = crate::library();
    // SAFETY: the assembly above defines the array with one slot per name, writable and aligned.
    let slots = unsafe { &cuda_driver_slots };
    for (slot, name) in slots.iter().zip(NAMES) {
        let address = match library {
            Ok(_) => name.to_str().ok().and_then(crate::symbol).unwrap_or(not_found as *const c_void),
            Err(_) => no_device as *const c_void,
        };
        // Release: whoever sees the address sees the loaded library.
        slot.store(address.cast_mut(), Ordering::Release);
    }
}

// Both ignore whatever arguments they get, which the C calling conventions of both architectures allow.
extern "C" fn no_device() -> c_int {
    NO_DEVICE
}

extern "C" fn not_found() -> c_int {
    NOT_FOUND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_unique() {
        assert!(NAMES.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn every_slot_is_filled() {
        fill();
        // SAFETY: as in `fill`.
        let slots = unsafe { &cuda_driver_slots };
        assert!(slots.iter().all(|slot| !slot.load(Ordering::Acquire).is_null()));
    }

    /// The arguments that a C function got, in integer and vector registers and on the stack.
    static SEEN: std::sync::Mutex<(Vec<u64>, Vec<f64>)> = std::sync::Mutex::new((Vec::new(), Vec::new()));

    #[allow(clippy::too_many_arguments)]
    extern "C" fn witness(
        a: u64,
        b: f64,
        c: u64,
        d: f64,
        e: u64,
        f: f64,
        g: u64,
        h: f64,
        i: u64,
        j: f64,
        k: u64,
        l: f64,
        m: u64,
        n: f64,
        o: u64,
        p: f64,
        q: u64,
        r: u64,
        s: u64,
        t: f64,
    ) -> c_int {
        *SEEN.lock().unwrap() = (vec![a, c, e, g, i, k, m, o, q, r, s], vec![b, d, f, h, j, l, n, p, t]);
        1234
    }

    /// A call through a slot that is still empty: `fill` runs, and all arguments arrive.
    #[test]
    fn arguments_pass_untouched_through_the_first_call() {
        type Wide = unsafe extern "C" fn(
            u64,
            f64,
            u64,
            f64,
            u64,
            f64,
            u64,
            f64,
            u64,
            f64,
            u64,
            f64,
            u64,
            f64,
            u64,
            f64,
            u64,
            u64,
            u64,
            f64,
        ) -> c_int;
        #[unsafe(naked)]
        unsafe extern "C" fn probe() {
            #[cfg(target_arch = "x86_64")]
            naked_asm!("call {fill}", "jmp {witness}", fill = sym fill_keeping_arguments, witness = sym witness);
            #[cfg(target_arch = "aarch64")]
            naked_asm!(
                "stp x16, x30, [sp, #-16]!",
                "bl {fill}",
                "ldp x16, x30, [sp], #16",
                "b {witness}",
                fill = sym fill_keeping_arguments,
                witness = sym witness
            );
        }
        // SAFETY: `probe` ends in `witness`, which has this type.
        let probe: Wide = unsafe { std::mem::transmute(probe as *const ()) };
        // SAFETY: `witness` is safe for any arguments.
        let code = unsafe { probe(1, 0.5, 2, 1.5, 3, 2.5, 4, 3.5, 5, 4.5, 6, 5.5, 7, 6.5, 8, 7.5, 9, 10, 11, 8.5) };
        assert_eq!(code, 1234);
        let seen = SEEN.lock().unwrap();
        assert_eq!(seen.0, (1..=11).collect::<Vec<u64>>());
        assert_eq!(seen.1, (0..9).map(|i| f64::from(i) + 0.5).collect::<Vec<f64>>());
    }
}
