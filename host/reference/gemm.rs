//! The grouped GEMMs: out [rows, N] in bf16 at sorted rows, each with the weights of the expert that owns the row.
//!
//! Every sum of products walks k in instructions of 16 ([`mma::mma16`]), ascending; K is completed with zeros. e4m3 operands
//! enter as bf16, which holds them exactly; codes 0x7F and 0xFF are NaN.

use std::ops::Range;
use std::sync::LazyLock;

use rayon::prelude::*;

use super::mma::{self, LANES, Row, STEP, Tile};
use super::quant::{GROUP, Quantized};
use super::silu_mul::{check_gating, silu_mul_quant_fp8};
use super::worklist::check_offsets;
use super::{math, rows_of};
use crate::error::{Error, Result, check_at_least, check_len};
use crate::{Activation, Gating};

/// Which operands a grouped GEMM has, and how it forms a sum. All of it is f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmKind {
    /// A bf16, weights e4m3. Each 128 k are one chain from +0: `outer = outer + inner·b_scale`.
    Fp8,
    /// A and weights e4m3. Each 64 k are one chain from +0: `outer = outer + inner·(a_scale·b_scale)`.
    W8a8,
    /// As `W8a8`, but each 32 k are one mma with e4m3 operands as an H200 makes it of others: p is the chain from +0 of two
    /// instructions of 16, the first over k 4q, 4q+1, 4q+16 and 4q+17, the second over k 4q+2, 4q+3, 4q+18 and 4q+19 (q = 0 to 3), and
    /// `inner = inner + p`.
    W8a8Native,
    /// A and weights bf16: one chain over K.
    Bf16,
}

/// Rows of K values: A, or one expert's weights [N, K].
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// bf16 bits.
    Bf16(&'a [u16]),
    /// e4m3 codes. Scales are [rows, ceil(K/128)] for A, [ceil(N/128), ceil(K/128)] for weights.
    E4m3 {
        /// Codes.
        codes: &'a [u8],
        /// Scales.
        scales: &'a [f32],
    },
}

/// A grouped GEMM and its operands.
#[derive(Clone, Copy, Debug)]
pub struct GroupedGemm<'a> {
    /// Operands and order of the sums.
    pub kind: GemmKind,
    /// Columns of the output N.
    pub n: usize,
    /// Length of the sums K.
    pub k: usize,
    /// First sorted row of each expert, and the number of rows at the end: `[E + 1]`.
    pub expert_offsets: &'a [i32],
    /// A row of each sorted row; a negative one counts as zeros. `None`: sorted row r has A row r.
    pub sorted_token_ids: Option<&'a [i32]>,
    /// A.
    pub a: Operand<'a>,
    /// Weights of each expert: `[E]`. `None`: not resident, its rows are left as they are.
    pub weights: &'a [Option<Operand<'a>>],
    /// f32 [E, N], added to a finished sum: `bf16(sum + bias)`.
    pub bias: Option<&'a [f32]>,
}

/// Every e4m3 code, decoded through bf16.
static CODES: LazyLock<[mma::Operand; 256]> =
    LazyLock::new(|| std::array::from_fn(|code| decoded(math::from_f32(Activation::Bf16, math::e4m3(code as u8)))));

fn decoded(bits: u16) -> mma::Operand {
    mma::Operand::decode(Activation::Bf16, bits)
}

impl Operand<'_> {
    fn len(&self) -> usize {
        match self {
            Operand::Bf16(values) => values.len(),
            Operand::E4m3 { codes, .. } => codes.len(),
        }
    }

    fn get(&self, index: usize) -> mma::Operand {
        match self {
            Operand::Bf16(values) => decoded(values[index]),
            Operand::E4m3 { codes, .. } => CODES[usize::from(codes[index])],
        }
    }

    /// Scale at (row, group of 128 k), if there are scales.
    fn scale(&self, row: usize, group: usize, k: usize) -> Option<f32> {
        match self {
            Operand::Bf16(_) => None,
            Operand::E4m3 { scales, .. } => Some(scales[row * k.div_ceil(GROUP) + group]),
        }
    }
}

impl GroupedGemm<'_> {
    /// `Err` naming the first argument that is outside its limits or of the wrong length.
    pub fn check(&self) -> Result<()> {
        let &GroupedGemm { n, k, weights, .. } = self;
        for (name, size) in [("n", n), ("k", k)] {
            if size == 0 {
                return Err(Error::argument(name, 0, "at least 1"));
            }
        }
        let elements = n.checked_mul(k).ok_or_else(|| Error::argument("n", n, "weights that fit the address space"))?;
        check_offsets(self.expert_offsets, weights.len())?;

        let a_rows = rows_of("a", self.a.len(), "k", k)?;
        match (self.kind, self.a) {
            (GemmKind::W8a8 | GemmKind::W8a8Native, Operand::E4m3 { scales, .. }) => {
                check_len("a_scale", scales.len(), a_rows * k.div_ceil(GROUP))?;
            }
            (GemmKind::Fp8 | GemmKind::Bf16, Operand::Bf16(_)) => {}
            (GemmKind::W8a8 | GemmKind::W8a8Native, _) => {
                return Err(Error::argument("a", "bf16", "e4m3 with scales"));
            }
            _ => return Err(Error::argument("a", "e4m3", "bf16")),
        }
        match self.sorted_token_ids {
            None => check_at_least("a", a_rows, self.live_rows())?,
            Some(ids) => {
                check_at_least("sorted_token_ids", ids.len(), self.live_rows())?;
                if let Some(id) = ids[..self.live_rows()].iter().find(|&&id| id >= 0 && id as usize >= a_rows) {
                    return Err(Error::argument("sorted_token_ids", id, format!("below the {a_rows} rows of a")));
                }
            }
        }

        let scales_needed = n.div_ceil(GROUP) * k.div_ceil(GROUP);
        let problem = |weights: &Operand<'_>| match (self.kind, weights) {
            (_, weights) if weights.len() != elements => Some(format!("{} elements, {elements} needed", weights.len())),
            (GemmKind::Bf16, Operand::Bf16(_)) => None,
            (GemmKind::Fp8 | GemmKind::W8a8 | GemmKind::W8a8Native, Operand::E4m3 { scales, .. }) => {
                (scales.len() != scales_needed).then(|| format!("{} scales, {scales_needed} needed", scales.len()))
            }
            (GemmKind::Bf16, _) => Some("e4m3 in place of bf16".to_owned()),
            _ => Some("bf16 in place of e4m3".to_owned()),
        };
        for (expert, weights) in weights.iter().enumerate() {
            if let Some(problem) = weights.as_ref().and_then(problem) {
                return Err(Error::Experts { name: "weights", experts: vec![expert], problem });
            }
        }
        match self.bias {
            Some(bias) => check_len("bias", bias.len(), weights.len().saturating_mul(n)),
            None => Ok(()),
        }
    }

    /// Sorted rows that belong to an expert.
    fn live_rows(&self) -> usize {
        self.expert_offsets.last().map_or(0, |&rows| rows as usize)
    }

    /// The expert of a sorted row, if there is one and it is resident.
    fn expert_of(&self, row: usize) -> Option<usize> {
        let expert = self.expert_offsets.partition_point(|&first| first as usize <= row).checked_sub(1)?;
        self.weights.get(expert)?.map(|_| expert)
    }

    /// The whole product. Rows of experts that are not resident, and those that belong to none, are left as they are.
    pub fn run(&self, out: &mut [u16]) -> Result<()> {
        self.check()?;
        let rows = rows_of("out", out.len(), "n", self.n)?;
        check_at_least("out", rows, self.live_rows())?;
        let rows = (0..self.live_rows()).filter(|&row| self.expert_of(row).is_some()).collect::<Vec<_>>();
        for (&row, values) in rows.iter().zip(self.at(&rows, 0..self.n)?) {
            out[row * self.n..][..self.n].copy_from_slice(&values);
        }
        Ok(())
    }

    /// Some columns of some sorted rows, with the bits that [`run`](Self::run) gives. Nothing for a row that it would leave
    /// as it is.
    pub fn at(&self, rows: &[usize], columns: Range<usize>) -> Result<Vec<Vec<u16>>> {
        self.check()?;
        if columns.start > columns.end || columns.end > self.n {
            return Err(Error::argument("columns", format!("{columns:?}"), format!("a range within 0..{}", self.n)));
        }
        let steps = self.steps();
        // Places in `rows`, by expert.
        let mut places_of = vec![Vec::new(); self.weights.len()];
        for (place, &row) in rows.iter().enumerate() {
            if let Some(expert) = self.expert_of(row) {
                places_of[expert].push(place);
            }
        }
        let a_row = |row: usize| match self.sorted_token_ids {
            None => Some(row),
            Some(ids) => usize::try_from(ids[row]).ok(),
        };
        let decoded_rows = rows
            .par_iter()
            .map(|&row| {
                self.expert_of(row)?;
                let zero = decoded(0);
                let first = a_row(row).map(|row| row * self.k);
                let value = |k: usize| first.filter(|_| k < self.k).map_or(zero, |first| self.a.get(first + k));
                Some(Row::new(steps, |position| value(self.k_at(position))))
            })
            .collect::<Vec<_>>();

        let tiles = columns.clone().step_by(LANES).collect::<Vec<_>>();
        let tasks = places_of.iter().enumerate().filter(|(_, places)| !places.is_empty());
        let tasks = tasks.flat_map(|task| tiles.iter().map(move |&first| (task, first))).collect::<Vec<_>>();
        let results = tasks
            .into_par_iter()
            .map(|((expert, places), first)| {
                let end = columns.end.min(first + LANES);
                let tile = self.tile(expert, first, end, steps);
                let result = |&place: &usize| {
                    let sums = decoded_rows[place].as_ref().map_or([0.0; LANES], |row| {
                        self.sums(&tile, row, expert, a_row(rows[place]), first, end, steps)
                    });
                    (place, std::array::from_fn(|lane| math::from_f32(Activation::Bf16, sums[lane])))
                };
                (first, end, places.iter().map(result).collect::<Vec<(usize, [u16; LANES])>>())
            })
            .collect::<Vec<_>>();

        let width = columns.len();
        let live = |row: &Option<Row>| if row.is_some() { vec![0; width] } else { Vec::new() };
        let mut out = decoded_rows.iter().map(live).collect::<Vec<_>>();
        for (first, end, values) in results {
            for (place, values) in values {
                out[place][first - columns.start..end - columns.start].copy_from_slice(&values[..end - first]);
            }
        }
        Ok(out)
    }

    /// Instructions of 16 k over K.
    fn steps(&self) -> usize {
        match self.kind {
            GemmKind::W8a8Native => 2 * self.k.div_ceil(2 * STEP),
            _ => self.k.div_ceil(STEP),
        }
    }

    /// The k of a position in the sequence of instructions.
    fn k_at(&self, position: usize) -> usize {
        if self.kind != GemmKind::W8a8Native {
            return position;
        }
        let (group, second, i) = (position / 32, position / 16 % 2, position % 16);
        32 * group + i / 8 * 16 + i % 8 / 2 * 4 + 2 * second + i % 2
    }

    /// Weight rows first..end of an expert.
    fn tile(&self, expert: usize, first: usize, end: usize, steps: usize) -> Tile {
        let zero = decoded(0);
        Tile::new(Activation::Bf16, steps, |lane, position| match (&self.weights[expert], self.k_at(position)) {
            (Some(weights), k) if first + lane < end && k < self.k => weights.get((first + lane) * self.k + k),
            _ => zero,
        })
    }

    /// The sums of one row with the weight rows first..end, bias included. `a_row` is none for a row of zeros.
    #[expect(clippy::too_many_arguments, reason = "the place of one tile of the output")]
    fn sums(
        &self,
        tile: &Tile,
        row: &Row,
        expert: usize,
        a_row: Option<usize>,
        first: usize,
        end: usize,
        steps: usize,
    ) -> [f32; LANES] {
        let fold = match self.kind {
            GemmKind::Fp8 => 128 / STEP,
            GemmKind::W8a8 | GemmKind::W8a8Native => 64 / STEP,
            GemmKind::Bf16 => steps,
        };
        let mut outer = [0f32; LANES];
        for start in (0..steps).step_by(fold) {
            let mut inner = [0f32; LANES];
            let these = start..steps.min(start + fold);
            if self.kind == GemmKind::W8a8Native {
                for first in these.step_by(2) {
                    let mut product = [0f32; LANES];
                    mma::chain_exact(tile, row, first..first + 2, &mut product);
                    inner = std::array::from_fn(|lane| inner[lane] + product[lane]);
                }
            } else {
                mma::chain_exact(tile, row, these, &mut inner);
            }
            let group = start * STEP / GROUP;
            // The scale of a row of zeros has no influence.
            let a_scale = a_row.map_or(Some(1.0), |row| self.a.scale(row, group, self.k));
            for lane in 0..end - first {
                let b_scale =
                    self.weights[expert].and_then(|weights| weights.scale((first + lane) / GROUP, group, self.k));
                let scale = match self.kind {
                    GemmKind::Bf16 => None,
                    GemmKind::Fp8 => b_scale,
                    GemmKind::W8a8 | GemmKind::W8a8Native => {
                        a_scale.zip(b_scale).map(|(a_scale, b_scale)| a_scale * b_scale)
                    }
                };
                outer[lane] = scale.map_or(inner[lane], |scale| outer[lane] + inner[lane] * scale);
            }
        }
        if let Some(bias) = self.bias {
            for (lane, column) in (first..end).enumerate() {
                outer[lane] += bias[expert * self.n + column];
            }
        }
        outer
    }
}

/// Two grouped GEMMs over the same rows, each rounded to bf16, then [`silu_mul_quant_fp8`]: codes [rows, N] and scales
/// [rows, ceil(N/128)] at sorted rows. Rows of experts that either does not have, and those that belong to none, are left as
/// they are.
pub fn gateup_silu(gate: &GroupedGemm<'_>, up: &GroupedGemm<'_>, gating: &Gating, out: &mut Quantized) -> Result<()> {
    gate.check()?;
    up.check()?;
    check_gating(gating)?;
    for (name, gate, up) in [("n", gate.n, up.n), ("k", gate.k, up.k)] {
        if gate != up {
            return Err(Error::argument(name, up, format!("{gate} as in the gate GEMM")));
        }
    }
    if gate.expert_offsets != up.expert_offsets {
        return Err(Error::argument("expert_offsets", "another list", "that of the gate GEMM"));
    }
    let (n, groups) = (gate.n, gate.n.div_ceil(GROUP));
    let allocated = rows_of("out_fp8", out.codes.len(), "n", n)?;
    check_at_least("out_fp8", allocated, gate.live_rows())?;
    check_len("out_scale", out.scales.len(), allocated * groups)?;
    let live = |row: &usize| gate.expert_of(*row).is_some() && up.expert_of(*row).is_some();
    let rows = (0..gate.live_rows()).filter(live).collect::<Vec<_>>();
    let (gates, ups) = (gate.at(&rows, 0..n)?.concat(), up.at(&rows, 0..n)?.concat());
    let result = silu_mul_quant_fp8(&gates, &ups, rows.len(), n, gating)?;
    for (place, row) in rows.into_iter().enumerate() {
        out.codes[row * n..][..n].copy_from_slice(&result.codes[place * n..][..n]);
        out.scales[row * groups..][..groups].copy_from_slice(&result.scales[place * groups..][..groups]);
    }
    Ok(())
}
