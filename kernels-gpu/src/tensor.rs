//! The inner loop: one 128-k chunk of a tile times eight or sixteen columns.

use crate::dequant::{Activation, Format, weights};
use crate::order::Order;
use crate::stream::Fragments;
use cuda_std::arch::Arch;
use cuda_std::memory::In;
use cuda_std::{mma, sync};

/// A lane's activations of one chunk: k 32t to 32t+31 of column g, in tensor-core order.
pub type Columns = [[u32; 4]; 4];

/// A lane's sums: rows g and g+8 of each 16 rows of the tile, columns 2t and 2t+1 of each eight.
pub type Sums<const TILES: usize, const GROUPS: usize> = [[[f32; 4]; GROUPS]; TILES];

/// Loads a lane's activations of a chunk, whose first word is at `x`: element 8t of the chunk as it is stored.
#[inline(always)]
pub fn columns(x: In<u16>) -> Columns {
    [x.fetch_v4(0), x.fetch_v4(32), x.fetch_v4(64), x.fetch_v4(96)]
}

/// Replaces word `w` of the activations by that of the chunk at `at`; of the second eight columns only where they are `used`.
#[inline(always)]
pub fn reload<const GROUPS: usize>(x: &mut [Columns; GROUPS], at: [In<u16>; GROUPS], w: usize, used: bool) {
    let mut group = 0;
    while group < GROUPS {
        if group == 0 || used {
            x[group][w] = at[group].fetch_v4(w * 32);
        }
        group += 1;
    }
}

/// Adds a chunk to `sums`, word by word: two mma a word, each of which takes four k of every lane t
/// ([`Order::PAIRS`]); the second eight columns only where they are `used`, which all lanes agree on. `reload(x, w)` replaces word w of the activations right after its last use, so that the loads of
/// the next chunk have a whole chunk's time.
#[inline(always)]
pub fn multiply<T: Activation, F: Format, O: Order, A: Arch, const TILES: usize, const GROUPS: usize>(
    chunk: &Fragments<F, TILES>,
    x: &mut [Columns; GROUPS],
    reload: impl Fn(&mut [Columns; GROUPS], usize),
    used: bool,
    sums: &mut Sums<TILES, GROUPS>,
) {
    sync::converge();
    let mut scales = [[[0; 2]; 2]; TILES];
    let mut tile = 0;
    while tile < TILES {
        scales[tile][0] = F::scales::<T, O, A>(chunk.scales[tile][0]);
        scales[tile][1] = F::scales::<T, O, A>(chunk.scales[tile][1]);
        tile += 1;
    }
    macro_rules! word {
        ($w:literal) => {
            let mut tile = 0;
            while tile < TILES {
                let [upper, lower] = chunk.codes[tile];
                let a = weights::<T, F, O, A>(upper[$w], scales[tile][0][$w / 2]);
                let b = weights::<T, F, O, A>(lower[$w], scales[tile][1][$w / 2]);
                let mut group = 0;
                while group < GROUPS && (group == 0 || used) {
                    let (x, sum) = (x[group][$w], &mut sums[tile][group]);
                    *sum = mma::m16n8k16::<T>([a[0], b[0], a[1], b[1]], [x[0], x[1]], *sum);
                    *sum = mma::m16n8k16::<T>([a[2], b[2], a[3], b[3]], [x[2], x[3]], *sum);
                    group += 1;
                }
                tile += 1;
            }
            reload(x, $w);
        };
    }
    word!(0);
    word!(1);
    word!(2);
    word!(3);
}
