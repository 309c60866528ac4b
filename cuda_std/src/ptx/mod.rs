//! The PTX side: one instruction a function, no policy.
//!
//! Three families of inline assembly: *pure* (conversions, products), *memory* (loads, stores, copies: never `pure`, so
//! that their order stays) and *collective* (always convergent intrinsics, or guarded by [`converge`]).

use core::arch::{asm, global_asm};

global_asm!(".extern .shared .align 128 .b8 DYNAMIC_SHARED[];");

unsafe extern "C" {
    #[link_name = "llvm.nvvm.read.ptx.sreg.tid.x"]
    fn tid_x() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.ntid.x"]
    fn ntid_x() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.ctaid.x"]
    fn ctaid_x() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.nctaid.x"]
    fn nctaid_x() -> u32;
}

unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
    fn barrier_all(id: u32);
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn barrier_count(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn nvvm_shfl_idx(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn nvvm_shfl_bfly(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    fn nvvm_shfl_down(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
    fn nvvm_shfl_up(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn nvvm_ballot(mask: u32, predicate: bool) -> u32;
    #[link_name = "llvm.nvvm.match.any.sync.i32"]
    fn nvvm_match_any(mask: u32, value: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.add"]
    fn nvvm_redux_add(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umax"]
    fn nvvm_redux_max(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umin"]
    fn nvvm_redux_min(value: u32, mask: u32) -> u32;
}

const FULL: u32 = u32::MAX;

#[inline(always)]
pub fn thread_idx() -> u32 {
    // SAFETY: reads a special register.
    unsafe { tid_x() }
}
#[inline(always)]
pub fn block_dim() -> u32 {
    // SAFETY: reads a special register.
    unsafe { ntid_x() }
}
#[inline(always)]
pub fn block_idx() -> u32 {
    // SAFETY: reads a special register.
    unsafe { ctaid_x() }
}
#[inline(always)]
pub fn grid_dim() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nctaid_x() }
}

#[inline(always)]
pub fn sync_threads() {
    // SAFETY: convergent intrinsic; the emulator checks that every thread arrives.
    unsafe { barrier_all(0) }
}
#[inline(always)]
pub fn sync_named(id: u32, threads: u32) {
    // SAFETY: as above, for `threads` threads.
    unsafe { barrier_count(id, threads) }
}
#[inline(always)]
pub fn sync_warp() {
    // SAFETY: convergent intrinsic over all lanes.
    unsafe { bar_warp_sync(FULL) }
}
#[inline(always)]
pub fn converge() {
    sync_warp()
}

macro_rules! shuffles {
    ($($name:ident, $nvvm:ident, $clamp:literal;)+) => {$(
        #[inline(always)]
        pub fn $name(value: u32, lane: u32) -> u32 {
            // SAFETY: convergent intrinsic over all lanes.
            unsafe { $nvvm(FULL, value, lane, $clamp) }
        }
    )+};
}
shuffles! {
    shfl_idx, nvvm_shfl_idx, 31;
    shfl_bfly, nvvm_shfl_bfly, 31;
    shfl_down, nvvm_shfl_down, 31;
    shfl_up, nvvm_shfl_up, 0;
}

#[inline(always)]
pub fn ballot(predicate: bool) -> u32 {
    // SAFETY: convergent intrinsic over all lanes.
    unsafe { nvvm_ballot(FULL, predicate) }
}
#[inline(always)]
pub fn match_any(value: u32) -> u32 {
    // SAFETY: convergent intrinsic over all lanes.
    unsafe { nvvm_match_any(FULL, value) }
}
#[inline(always)]
pub fn redux_add(value: u32) -> u32 {
    // SAFETY: convergent intrinsic over all lanes.
    unsafe { nvvm_redux_add(value, FULL) }
}
#[inline(always)]
pub fn redux_max(value: u32) -> u32 {
    // SAFETY: convergent intrinsic over all lanes.
    unsafe { nvvm_redux_max(value, FULL) }
}
#[inline(always)]
pub fn redux_min(value: u32) -> u32 {
    // SAFETY: convergent intrinsic over all lanes.
    unsafe { nvvm_redux_min(value, FULL) }
}

/// Elements that can cross between registers and shared memory.
pub trait RawElement: Sized {
    #[doc(hidden)]
    unsafe fn load_shared(address: u32) -> Self;
    #[doc(hidden)]
    unsafe fn store_shared(address: u32, value: Self);
    #[doc(hidden)]
    unsafe fn load_constant(address: *const Self) -> Self;
}

macro_rules! raw_elements {
    ($($t:ty, $class:ident, $register:ty, $load:literal, $store:literal, $constant:literal;)+) => {$(
        impl RawElement for $t {
            #[inline(always)]
            unsafe fn load_shared(address: u32) -> Self {
                let value: $register;
                // SAFETY: the caller passes an address inside the block's dynamic shared memory.
                unsafe { asm!(concat!($load, " {}, [{}];"), out($class) value, in(reg32) address, options(nostack)) };
                value as $t
            }
            #[inline(always)]
            unsafe fn store_shared(address: u32, value: Self) {
                // SAFETY: as above.
                unsafe {
                    asm!(concat!($store, " [{}], {};"), in(reg32) address, in($class) value as $register,
                        options(nostack))
                };
            }
            #[inline(always)]
            unsafe fn load_constant(address: *const Self) -> Self {
                let value: $register;
                // SAFETY: the caller passes the address of an element of global memory that is constant while the kernel runs.
                unsafe {
                    asm!(concat!($constant, " {}, [{}];"), out($class) value, in(reg64) address,
                        options(pure, readonly, nostack, preserves_flags))
                };
                value as $t
            }
        }
    )+};
}
raw_elements! {
    u8, reg16, u16, "ld.shared.u8", "st.shared.u8", "ld.global.nc.u8";
    u16, reg16, u16, "ld.shared.u16", "st.shared.u16", "ld.global.nc.u16";
    u32, reg32, u32, "ld.shared.u32", "st.shared.u32", "ld.global.nc.u32";
    i32, reg32, i32, "ld.shared.s32", "st.shared.s32", "ld.global.nc.s32";
    u64, reg64, u64, "ld.shared.u64", "st.shared.u64", "ld.global.nc.u64";
    f32, reg32, f32, "ld.shared.f32", "st.shared.f32", "ld.global.nc.f32";
}

/// Shared-window address of byte `offset` of the dynamic shared memory.
#[inline(always)]
fn shared_address(offset: u32) -> u32 {
    let base: u32;
    // SAFETY: reads a symbol's address.
    unsafe { asm!("mov.u32 {}, DYNAMIC_SHARED;", out(reg32) base, options(pure, nomem, nostack, preserves_flags)) };
    base + offset
}

#[inline(always)]
pub fn check_view(_: u32, _: u32, _: u32) {}

#[inline(always)]
pub fn load_shared<T: RawElement>(offset: u32) -> T {
    // SAFETY: `Shared` names bytes of the launch's dynamic shared memory.
    unsafe { T::load_shared(shared_address(offset)) }
}
#[inline(always)]
pub fn store_shared<T: RawElement>(offset: u32, value: T) {
    // SAFETY: `Shared` names bytes of the launch's dynamic shared memory.
    unsafe { T::store_shared(shared_address(offset), value) }
}
#[inline(always)]
pub fn load_shared_v4(offset: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: `Shared` names 16 aligned bytes of the launch's dynamic shared memory.
    unsafe {
        asm!("ld.shared.v4.u32 {{{}, {}, {}, {}}}, [{}];", out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d,
            in(reg32) shared_address(offset), options(nostack))
    };
    [a, b, c, d]
}
#[inline(always)]
pub fn load_shared_v2(offset: u32) -> [u32; 2] {
    let (a, b): (u32, u32);
    // SAFETY: `Shared` names 8 aligned bytes of the launch's dynamic shared memory.
    unsafe {
        asm!("ld.shared.v2.u32 {{{}, {}}}, [{}];", out(reg32) a, out(reg32) b, in(reg32) shared_address(offset),
            options(nostack))
    };
    [a, b]
}
#[inline(always)]
pub fn store_shared_v4(offset: u32, value: [u32; 4]) {
    // SAFETY: `Shared` names 16 aligned bytes of the launch's dynamic shared memory.
    unsafe {
        asm!("st.shared.v4.u32 [{}], {{{}, {}, {}, {}}};", in(reg32) shared_address(offset), in(reg32) value[0],
            in(reg32) value[1], in(reg32) value[2], in(reg32) value[3], options(nostack))
    };
}
#[inline(always)]
pub fn ldmatrix_x4(offset: u32) -> [u32; 4] {
    converge();
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: each lane names 16 aligned bytes of the launch's dynamic shared memory; the guard keeps lanes together.
    unsafe {
        asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{}, {}, {}, {}}}, [{}];", out(reg32) a, out(reg32) b,
            out(reg32) c, out(reg32) d, in(reg32) shared_address(offset), options(nostack))
    };
    [a, b, c, d]
}

/// Pointer of an [`crate::memory::In`].
pub struct RawIn<T>(pub *const T);
/// Pointer of an [`crate::memory::Out`].
pub struct RawOut<T>(pub *mut T);

impl<T> Clone for RawIn<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for RawIn<T> {}
impl<T> Clone for RawOut<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for RawOut<T> {}

/// 16 bytes that LLVM moves with one vector instruction.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Vector([u32; 4]);

/// 8 bytes that LLVM moves with one vector instruction.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Pair([u32; 2]);

impl<T: Copy> RawIn<T> {
    #[inline(always)]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }
    #[inline(always)]
    pub fn load(self, index: usize) -> T {
        // SAFETY: the kernel's contract keeps `index` inside; the emulator checks it.
        unsafe { *self.0.add(index) }
    }
    #[inline(always)]
    pub fn load_v4(self, index: usize) -> [u32; 4] {
        // SAFETY: as above, for 16 aligned bytes.
        unsafe { (*self.0.add(index).cast::<Vector>()).0 }
    }
    #[inline(always)]
    pub fn at(address: u64, _: usize) -> Self {
        RawIn(address as *const T)
    }
    #[inline(always)]
    pub fn skip(self, elements: usize) -> Self {
        RawIn(self.0.wrapping_add(elements))
    }
    #[inline(always)]
    pub fn stream(self, index: usize) -> T
    where
        T: RawElement,
    {
        // SAFETY: as above; the data is constant while the kernel runs.
        unsafe { T::load_constant(self.0.add(index)) }
    }
    #[inline(always)]
    pub fn fetch_v4(self, index: usize) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: as above, for 16 aligned bytes.
        unsafe {
            asm!("ld.global.v4.b32 {{{}, {}, {}, {}}}, [{}];", out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d,
                in(reg64) self.0.wrapping_add(index), options(pure, readonly, nostack, preserves_flags))
        };
        [a, b, c, d]
    }
    #[inline(always)]
    pub fn stream_v4(self, index: usize) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: as above; the data is constant while the kernel runs.
        unsafe {
            asm!("ld.global.nc.L1::no_allocate.v4.u32 {{{}, {}, {}, {}}}, [{}];", out(reg32) a, out(reg32) b,
                out(reg32) c, out(reg32) d, in(reg64) self.0.add(index),
                options(pure, readonly, nostack, preserves_flags))
        };
        [a, b, c, d]
    }
}

impl<T: Copy> RawOut<T> {
    #[inline(always)]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }
    #[inline(always)]
    pub fn load(self, index: usize) -> T {
        // SAFETY: the kernel's contract keeps `index` inside; the emulator checks it.
        unsafe { *self.0.add(index) }
    }
    #[inline(always)]
    pub fn store(self, index: usize, value: T) {
        // SAFETY: as above.
        unsafe { *self.0.add(index) = value }
    }
    #[inline(always)]
    pub fn store_v4(self, index: usize, value: [u32; 4]) {
        // SAFETY: as above, for 16 aligned bytes.
        unsafe { *self.0.add(index).cast::<Vector>() = Vector(value) }
    }
    #[inline(always)]
    pub fn store_v2(self, index: usize, value: [u32; 2]) {
        // SAFETY: as above, for 8 aligned bytes.
        unsafe { *self.0.add(index).cast::<Pair>() = Pair(value) }
    }
    #[inline(always)]
    pub fn store_word(self, index: usize, value: u32) {
        // SAFETY: as above, for 4 aligned bytes.
        unsafe { *self.0.add(index).cast::<u32>() = value }
    }
}

impl RawOut<u32> {
    #[inline(always)]
    pub fn atomic_or(self, index: usize, bits: u32) {
        // SAFETY: as above.
        unsafe { asm!("red.global.or.b32 [{}], {};", in(reg64) self.0.add(index), in(reg32) bits, options(nostack)) };
    }
}

#[inline(always)]
pub fn cp_async16<T>(to: u32, from: RawIn<T>, index: usize, bytes: u32) {
    // SAFETY: 16 aligned bytes of shared memory; `bytes` aligned bytes of the buffer are read.
    unsafe {
        asm!("cp.async.cg.shared.global.L2::128B [{}], [{}], 16, {};", in(reg32) shared_address(to),
            in(reg64) from.0.wrapping_add(index), in(reg32) bytes, options(nostack))
    };
}
#[inline(always)]
pub fn cp_async8<T>(to: u32, from: RawIn<T>, index: usize, bytes: u32) {
    // SAFETY: as above, for 8 bytes.
    unsafe {
        asm!("cp.async.ca.shared.global [{}], [{}], 8, {};", in(reg32) shared_address(to),
            in(reg64) from.0.wrapping_add(index), in(reg32) bytes, options(nostack))
    };
}
#[inline(always)]
pub fn cp_async4<T>(to: u32, from: RawIn<T>, index: usize, bytes: u32) {
    // SAFETY: as above, for 4 bytes.
    unsafe {
        asm!("cp.async.ca.shared.global [{}], [{}], 4, {};", in(reg32) shared_address(to),
            in(reg64) from.0.wrapping_add(index), in(reg32) bytes, options(nostack))
    };
}
#[inline(always)]
pub fn cp_async_commit() {
    // SAFETY: closes this thread's group.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) };
}
#[inline(always)]
pub fn cp_async_wait<const PENDING: u32>() {
    // SAFETY: waits for this thread's groups.
    unsafe { asm!("cp.async.wait_group {};", const PENDING, options(nostack)) };
}

// Both may touch any memory as far as the compiler knows, so that no access moves over them and they stay in order.
#[inline(always)]
pub fn dependency_wait() {
    // SAFETY: waits for other kernels.
    unsafe { asm!("griddepcontrol.wait;", options(nostack)) };
}
#[inline(always)]
pub fn launch_dependents() {
    // SAFETY: only lets another kernel start, which waits before it uses what this one writes.
    unsafe { asm!("griddepcontrol.launch_dependents;", options(nostack)) };
}

/// A function that is one pure instruction.
macro_rules! pure {
    ($($name:ident($($arg:ident: $t:ty as $class:ident),+) -> $out:ty as $out_class:ident = $text:literal;)+) => {$(
        #[inline(always)]
        pub fn $name($($arg: $t),+) -> $out {
            let out: $out;
            // SAFETY: register to register.
            unsafe {
                asm!($text, out = out($out_class) out, $($arg = in($class) $arg,)+
                    options(pure, nomem, nostack, preserves_flags))
            };
            out
        }
    )+};
}
pure! {
    f32_to_bf16(value: f32 as reg32) -> u16 as reg16 = "cvt.rn.bf16.f32 {out}, {value};";
    f32_to_f16(value: f32 as reg32) -> u16 as reg16 = "cvt.rn.f16.f32 {out}, {value};";
    f16_to_f32(value: u16 as reg16) -> f32 as reg32 = "cvt.f32.f16 {out}, {value};";
    f32x2_to_bf16x2(low: f32 as reg32, high: f32 as reg32) -> u32 as reg32 = "cvt.rn.bf16x2.f32 {out}, {high}, {low};";
    mul_f16x2(a: u32 as reg32, b: u32 as reg32) -> u32 as reg32 = "mul.rn.f16x2 {out}, {a}, {b};";
    permute_bytes(a: u32 as reg32, b: u32 as reg32, selector: u32 as reg32) -> u32 as reg32 =
        "prmt.b32 {out}, {a}, {b}, {selector};";
    select_bits(mask: u32 as reg32, a: u32 as reg32, b: u32 as reg32) -> u32 as reg32 =
        "lop3.b32 {out}, {mask}, {a}, {b}, 0xCA;";
    duplicate_low(pair: u32 as reg32) -> u32 as reg32 =
        "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {pair}; mov.b32 {out}, {{low, low}}; }}";
    duplicate_high(pair: u32 as reg32) -> u32 as reg32 =
        "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {pair}; mov.b32 {out}, {{high, high}}; }}";
    e4m3x2_to_f16x2(codes: u16 as reg16) -> u32 as reg32 = "cvt.rn.f16x2.e4m3x2 {out}, {codes};";
    f32x2_to_e4m3x2(low: f32 as reg32, high: f32 as reg32) -> u16 as reg16 =
        "cvt.rn.satfinite.e4m3x2.f32 {out}, {high}, {low};";
    max_nan(a: f32 as reg32, b: f32 as reg32) -> f32 as reg32 = "max.NaN.f32 {out}, {a}, {b};";
    min_nan(a: f32 as reg32, b: f32 as reg32) -> f32 as reg32 = "min.NaN.f32 {out}, {a}, {b};";
    fma(a: f32 as reg32, b: f32 as reg32, c: f32 as reg32) -> f32 as reg32 = "fma.rn.f32 {out}, {a}, {b}, {c};";
    sqrt(x: f32 as reg32) -> f32 as reg32 = "sqrt.rn.f32 {out}, {x};";
}

/// `mul.bf16x2` needs sm_90; a·b + (-0) rounds the same value once and keeps the sign of a zero.
#[cfg(any(cuda_arch = "sm_80", cuda_arch = "sm_89"))]
#[inline(always)]
pub fn mul_bf16x2(a: u32, b: u32) -> u32 {
    let out: u32;
    // SAFETY: register to register.
    unsafe {
        asm!("fma.rn.bf16x2 {}, {}, {}, {};", out(reg32) out, in(reg32) a, in(reg32) b, in(reg32) 0x8000_8000u32,
            options(pure, nomem, nostack, preserves_flags))
    };
    out
}
#[cfg(not(any(cuda_arch = "sm_80", cuda_arch = "sm_89")))]
#[inline(always)]
pub fn mul_bf16x2(a: u32, b: u32) -> u32 {
    let out: u32;
    // SAFETY: register to register.
    unsafe {
        asm!("mul.rn.bf16x2 {}, {}, {};", out(reg32) out, in(reg32) a, in(reg32) b,
            options(pure, nomem, nostack, preserves_flags))
    };
    out
}

#[inline(always)]
pub fn e2m1x2_to_f16x2(codes: u8) -> u32 {
    let out: u32;
    // SAFETY: register to register.
    unsafe {
        asm!("{{ .reg .b8 c; cvt.u8.u16 c, {}; cvt.rn.f16x2.e2m1x2 {}, c; }}", in(reg16) codes as u16, out(reg32) out,
            options(pure, nomem, nostack, preserves_flags))
    };
    out
}

macro_rules! mma {
    ($($name:ident, $shape:literal, $ty:literal;)+) => {$(
        #[inline(always)]
        pub fn $name(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
            let [mut d0, mut d1, mut d2, mut d3] = c;
            // SAFETY: register to register over all lanes; the kernel's guard keeps them together.
            unsafe {
                asm!(
                    concat!("mma.sync.aligned.", $shape, ".row.col.f32.", $ty, ".", $ty,
                        ".f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};"),
                    inout(reg32) d0, inout(reg32) d1, inout(reg32) d2, inout(reg32) d3,
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                    in(reg32) b[0], in(reg32) b[1],
                    options(nomem, nostack, preserves_flags))
            };
            [d0, d1, d2, d3]
        }
    )+};
}
mma! {
    mma_m16n8k16_bf16, "m16n8k16", "bf16";
    mma_m16n8k16_f16, "m16n8k16", "f16";
    mma_m16n8k32_e4m3, "m16n8k32", "e4m3";
}
