//! `tile_worklist` and `tile_worklist_packed6`: the output tiles of a grouped GEMM, one after another.

use crate::error::{Error, Result, check_len};

/// Items [expert, first sorted row of the tile, rows of the tile, column tile]: experts ascending, of each the row tiles of
/// `m_tile` rows ascending, of each of those the `n_tiles` column tiles ascending. Experts that are not resident have none.
pub fn tile_worklist(expert_offsets: &[i32], resident: &[bool], n_tiles: u32, m_tile: u32) -> Result<Vec<[u32; 4]>> {
    check_offsets(expert_offsets, resident.len())?;
    for (name, tiles) in [("n_tiles", n_tiles), ("m_tile", m_tile)] {
        if tiles == 0 {
            return Err(Error::argument(name, 0, "at least 1"));
        }
    }
    let mut items = Vec::new();
    for (expert, rows) in expert_offsets.windows(2).enumerate().filter(|(expert, _)| resident[*expert]) {
        let (mut first, end) = (rows[0] as u32, rows[1] as u32);
        while first < end {
            let rows = m_tile.min(end - first);
            items.extend((0..n_tiles).map(|column| [expert as u32, first, rows, column]));
            first += rows;
        }
    }
    Ok(items)
}

/// The same items as [expert, row tile of the expert · 64 + column tile].
pub fn tile_worklist_packed6(
    expert_offsets: &[i32],
    resident: &[bool],
    n_tiles: u32,
    m_tile: u32,
) -> Result<Vec<[u32; 2]>> {
    if n_tiles > 64 {
        return Err(Error::argument("n_tiles", n_tiles, "1..=64: six bits"));
    }
    let items = tile_worklist(expert_offsets, resident, n_tiles, m_tile)?;
    let pack = |[expert, first, _, column]: [u32; 4]| {
        let row_tile = (first - expert_offsets[expert as usize] as u32) / m_tile;
        if row_tile >= 1 << 26 {
            return Err(Error::argument("n_tiles", n_tiles, "row tiles below 2^26 in a packed item"));
        }
        Ok([expert, row_tile << 6 | column])
    };
    items.into_iter().map(pack).collect()
}

/// Items that suffice for `te` pairs however they are distributed.
pub fn worklist_capacity(te: usize, experts: usize, n_tiles: u32, m_tile: u32) -> usize {
    te.div_ceil(m_tile as usize).saturating_add(experts.min(te)).saturating_mul(n_tiles as usize)
}

/// `Err` unless these are the ascending offsets of `experts` experts, from 0.
pub(super) fn check_offsets(expert_offsets: &[i32], experts: usize) -> Result<()> {
    if experts == 0 {
        return Err(Error::argument("num_experts", 0, "at least 1"));
    }
    check_len("expert_offsets", expert_offsets.len(), experts + 1)?;
    if expert_offsets[0] != 0 {
        return Err(Error::argument("expert_offsets", expert_offsets[0], "0 at the start"));
    }
    if let Some(e) = expert_offsets.windows(2).position(|rows| rows[0] > rows[1]) {
        let given = format!("{} after {}", expert_offsets[e + 1], expert_offsets[e]);
        return Err(Error::argument("expert_offsets", given, "ascending values"));
    }
    Ok(())
}
