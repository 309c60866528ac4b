//! Dynamic shared memory. A kernel divides it by constant byte offsets; everything is an offset, so no generic address
//! ever appears.

use crate::imp;
use crate::memory::Element;

/// `len` elements of shared memory from byte `base` on.
pub struct Shared<T> {
    base: u32,
    len: u32,
    element: core::marker::PhantomData<T>,
}

impl<T> Clone for Shared<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

impl<T: Element> Shared<T> {
    /// The view of `len` elements from byte `base` on (a multiple of the element size).
    #[inline(always)]
    pub fn at(base: u32, len: u32) -> Self {
        Shared { base, len, element: core::marker::PhantomData }
    }

    /// Byte offset of element `index`.
    #[inline(always)]
    pub fn byte(self, index: u32) -> u32 {
        self.base + index * size_of::<T>() as u32
    }

    /// Number of elements.
    #[inline(always)]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(self) -> u32 {
        self.len
    }

    #[inline(always)]
    #[track_caller]
    fn check(self, index: u32, elements: u32) {
        imp::check_view(index, elements, self.len)
    }

    /// Checks that the view holds `bytes` bytes from element `index` on.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn check_bytes(self, index: u32, bytes: u32) {
        self.check(index, bytes.div_ceil(size_of::<T>() as u32))
    }

    /// Element `index` (`ld.shared`).
    #[inline(always)]
    #[track_caller]
    pub fn load(self, index: u32) -> T {
        self.check(index, 1);
        imp::load_shared(self.byte(index))
    }

    /// Writes element `index` (`st.shared`).
    #[inline(always)]
    #[track_caller]
    pub fn store(self, index: u32, value: T) {
        self.check(index, 1);
        imp::store_shared(self.byte(index), value)
    }

    /// The 16 bytes from element `index` on, 16-byte aligned (`ld.shared.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn load_v4(self, index: u32) -> [u32; 4] {
        self.check(index, 16 / size_of::<T>() as u32);
        imp::load_shared_v4(self.byte(index))
    }

    /// The 8 bytes from element `index` on, 8-byte aligned (`ld.shared.v2.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn load_v2(self, index: u32) -> [u32; 2] {
        self.check(index, 8 / size_of::<T>() as u32);
        imp::load_shared_v2(self.byte(index))
    }

    /// Writes 16 bytes from element `index` on, 16-byte aligned (`st.shared.v4.b32`).
    #[inline(always)]
    #[track_caller]
    pub fn store_v4(self, index: u32, value: [u32; 4]) {
        self.check(index, 16 / size_of::<T>() as u32);
        imp::store_shared_v4(self.byte(index), value)
    }
}

impl Shared<u16> {
    /// Four 8x8 matrices of 16-bit elements (`ldmatrix.sync.aligned.m8n8.x4`): lane i names row i mod 8 of matrix i / 8
    /// by element `index` (16-byte aligned); register j of lane 4g+t holds elements 2t and 2t+1 of row g of matrix j.
    #[inline(always)]
    #[track_caller]
    pub fn ldmatrix_x4(self, index: u32) -> [u32; 4] {
        self.check(index, 8);
        imp::ldmatrix_x4(self.byte(index))
    }
}
