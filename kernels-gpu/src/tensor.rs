//! One 128-k chunk of a 16-row tile times eight columns.

use crate::dequant::{Activation, Format};
use cuda_std::arch::Arch;
use cuda_std::memory::In;
use cuda_std::{mma, sync};

/// A lane's activations of one chunk: k 32t to 32t+31 of column g, in tensor-core order.
pub type Columns = [[u32; 4]; 4];

/// Loads a lane's activations from element `index` on.
#[inline(always)]
pub fn columns(x: In<u16>, index: usize) -> Columns {
    [x.load_v4(index), x.load_v4(index + 8), x.load_v4(index + 16), x.load_v4(index + 24)]
}

/// Adds the chunk to `sum`: eight mma, of which the j-th takes k 32t+4j to 32t+4j+3 of every lane t.
#[inline(always)]
pub fn multiply<T: Activation, F: Format, A: Arch>(
    codes: [[u32; 4]; 2],
    scales: [F::Scales; 2],
    x: Columns,
    mut sum: [f32; 4],
) -> [f32; 4] {
    sync::converge();
    let scales = [F::scales::<T, A>(scales[0]), F::scales::<T, A>(scales[1])];
    macro_rules! word {
        ($w:literal) => {
            let a = T::decode::<A>(codes[0][$w]).map(|pair| T::mul(pair, scales[0][$w / 2]));
            let b = T::decode::<A>(codes[1][$w]).map(|pair| T::mul(pair, scales[1][$w / 2]));
            sum = mma::m16n8k16::<T>([a[0], b[0], a[1], b[1]], [x[$w][0], x[$w][1]], sum);
            sum = mma::m16n8k16::<T>([a[2], b[2], a[3], b[3]], [x[$w][2], x[$w][3]], sum);
        };
    }
    word!(0);
    word!(1);
    word!(2);
    word!(3);
    sum
}
