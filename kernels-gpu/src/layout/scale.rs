//! The 128x4 swizzle of block scales (CUTLASS's layout for NVFP4 and MXFP4).

/// `value` rounded up to a multiple of `multiple`.
pub const fn round_up(value: usize, multiple: usize) -> usize {
    value.div_ceil(multiple) * multiple
}

/// Rows of a swizzled scale buffer that holds `rows` rows.
pub const fn padded_rows(rows: usize) -> usize {
    round_up(rows, 128)
}

/// Columns of a swizzled scale buffer that holds `cols` columns.
pub const fn padded_cols(cols: usize) -> usize {
    round_up(cols, 4)
}

/// Bytes of one expert's swizzled scales.
pub const fn swizzled_len(rows: usize, cols: usize) -> usize {
    padded_rows(rows) * padded_cols(cols)
}

/// Byte offset of the scale of (`row`, `col`) where a row has `padded_cols` columns.
pub const fn swizzled_offset(row: usize, col: usize, padded_cols: usize) -> usize {
    ((row / 128) * (padded_cols / 4) + col / 4) * 512 + (row % 32) * 16 + ((row / 32) % 4) * 4 + col % 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_written_by_hand() {
        let cols = padded_cols(22);
        assert_eq!(swizzled_len(320, 22), 9216);
        for (row, col, offset) in
            [(1, 0, 16), (32, 0, 4), (33, 5, 533), (127, 21, 3069), (128, 0, 3072), (319, 21, 9205)]
        {
            assert_eq!(swizzled_offset(row, col, cols), offset);
        }
        assert_eq!(swizzled_offset(129, 2, 8), 1042);
        assert_eq!(swizzled_offset(255, 7, 8), 2047);
    }
}
