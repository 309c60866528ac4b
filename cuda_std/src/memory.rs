//! Typed global buffers as kernel parameters. On the GPU they are bare pointers, and a kernel must stay inside by its own
//! logic; the emulator knows each buffer's length and checks every access.

use crate::imp;

/// Element of a buffer: plain bits, no padding.
pub trait Element: Copy + Send + Sync + 'static + imp::RawElement {}

macro_rules! elements {
    ($($t:ty),+) => {$(impl Element for $t {})+};
}
elements!(u8, u16, u32, u64, i32, f32);

/// A buffer that the kernel reads.
pub struct In<T>(pub(crate) imp::RawIn<T>);

/// A buffer that the kernel writes (and may read back).
pub struct Out<T>(pub(crate) imp::RawOut<T>);

impl<T> Clone for In<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for In<T> {}
impl<T> Clone for Out<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}

impl<T: Element> In<T> {
    /// Whether the host passed no buffer.
    #[inline(always)]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The `len` elements at device address `address`, as tables of addresses hold them; 0 gives no buffer. Read them with
    /// [`In::stream`], [`In::stream_v4`], [`In::fetch_v4`] and asynchronous copies: of an address that was loaded the compiler does not know that
    /// it is global, and other loads become generic ones.
    #[inline(always)]
    #[track_caller]
    pub fn at(address: u64, len: usize) -> Self {
        In(imp::RawIn::at(address, len))
    }

    /// The buffer from element `elements` on; behind its end there is nothing to read.
    #[inline(always)]
    #[track_caller]
    pub fn skip(self, elements: usize) -> Self {
        In(self.0.skip(elements))
    }

    /// Element `index` (`ld.global`).
    #[inline(always)]
    #[track_caller]
    pub fn load(self, index: usize) -> T {
        self.0.load(index)
    }

    /// Element `index` of data that no launch in flight writes (`ld.global.nc`).
    #[inline(always)]
    #[track_caller]
    pub fn stream(self, index: usize) -> T {
        self.0.stream(index)
    }

    /// The 16 bytes from element `index` on, which must be 16-byte aligned (`ld.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn load_v4(self, index: usize) -> [u32; 4] {
        self.0.load_v4(index)
    }

    /// As [`In::load_v4`] of an address of which the compiler cannot see that it is global.
    #[inline(always)]
    #[track_caller]
    pub fn fetch_v4(self, index: usize) -> [u32; 4] {
        self.0.fetch_v4(index)
    }

    /// As [`In::load_v4`] for data that is read once and that no launch in flight writes
    /// (`ld.global.nc.L1::no_allocate.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn stream_v4(self, index: usize) -> [u32; 4] {
        self.0.stream_v4(index)
    }
}

impl<T: Element> Out<T> {
    /// Whether the host passed no buffer.
    #[inline(always)]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Element `index` (`ld.global`).
    #[inline(always)]
    #[track_caller]
    pub fn load(self, index: usize) -> T {
        self.0.load(index)
    }

    /// Writes element `index` (`st.global`).
    #[inline(always)]
    #[track_caller]
    pub fn store(self, index: usize, value: T) {
        self.0.store(index, value)
    }

    /// Writes 16 bytes from element `index` on, which must be 16-byte aligned (`st.global.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn store_v4(self, index: usize, value: [u32; 4]) {
        self.0.store_v4(index, value)
    }

    /// Writes 8 bytes from element `index` on, which must be 8-byte aligned (`st.global.v2.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn store_v2(self, index: usize, value: [u32; 2]) {
        self.0.store_v2(index, value)
    }

    /// Writes 4 bytes from element `index` on, which must be 4-byte aligned (`st.global.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn store_word(self, index: usize, value: u32) {
        self.0.store_word(index, value)
    }
}

impl Out<u32> {
    /// Ors `bits` into element `index` atomically (`red.global.or.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn atomic_or(self, index: usize, bits: u32) {
        self.0.atomic_or(index, bits)
    }
}
