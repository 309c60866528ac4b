//! Which rows of a weight matrix form one tile of 8 or 16 rows.
//!
//! In the 128x4 swizzle 16 consecutive bytes hold the scales of rows r, r+32, r+64 and r+96. A tile therefore takes rows at
//! stride 32: it then uses every byte of each 32-byte sector of scales that it fetches, where consecutive rows would
//! fetch four times as many sectors. Rows past the last whole block of 128 are taken consecutively.

/// Matrix rows of a tile of `tile_rows` (4, 8, 16 or 32) rows of a matrix of `rows` rows: (first, step), where row 4i + `j` of
/// the tile is first + i·step. At or above `rows` there is no such row (only in the last tile).
#[inline(always)]
pub const fn tile_rows(tile: u32, j: u32, tile_rows: u32, rows: u32) -> (u32, u32) {
    let start = tile * tile_rows;
    if start < rows / 128 * 128 { (start / 128 * 128 + j * 32 + start % 128 / 4, 1) } else { (start + j, 4) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile_row(tile: u32, r: u32, rows_of_tile: u32, rows: u32) -> u32 {
        let (first, step) = tile_rows(tile, r % 4, rows_of_tile, rows);
        first + r / 4 * step
    }

    #[test]
    fn rows_written_by_hand() {
        assert_eq!([0, 1, 2, 3, 4, 7].map(|r| tile_row(0, r, 8, 256)), [0, 32, 64, 96, 1, 97]);
        assert_eq!(tile_row(17, 5, 8, 256), 128 + 32 + 3);
        assert_eq!(tile_row(16, 3, 8, 144), 131);
        assert_eq!(tile_row(7, 15, 16, 128), 127);
    }

    #[test]
    fn every_row_is_in_exactly_one_tile() {
        for height in [4, 8, 16, 32] {
            for rows in [1, 8, 16, 96, 127, 128, 129, 320, 704] {
                let mut seen = vec![0; rows as usize];
                for tile in 0..u32::div_ceil(rows, height) {
                    for r in 0..height {
                        if let Some(count) = seen.get_mut(tile_row(tile, r, height, rows) as usize) {
                            *count += 1;
                        }
                    }
                }
                assert!(seen.iter().all(|&count| count == 1), "{height} of {rows}");
            }
        }
    }
}
