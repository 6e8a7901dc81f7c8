//! Reads the arrays of a NumPy `.npz` file: a zip archive of `.npy` members.

/// The bytes of a member's values; `None` if the archive lacks it or differs from NumPy's format.
pub(super) fn member(archive: &[u8], name: &str) -> Option<Vec<u8>> {
    // The list of members ends with a record of 22 bytes, which says where it begins.
    let end = archive.len().checked_sub(22)?;
    let (count, mut at) = (number(archive, end + 10, 2)?, number(archive, end + 16, 4)?);
    for _ in 0..count {
        let [method, packed, length] = [(10, 2), (20, 4), (24, 4)].map(|(k, n)| number(archive, at + k, n));
        let [named, extra, comment] = [28, 30, 32].map(|k| number(archive, at + k, 2));
        let file = archive.get(at + 46..at + 46 + named?)?;
        if file == name.as_bytes() {
            let head = number(archive, at + 42, 4)?;
            let body = head + 30 + number(archive, head + 26, 2)? + number(archive, head + 28, 2)?;
            let body = archive.get(body..body + packed?)?;
            let array = match method? {
                0 => body.to_vec(),
                8 => miniz_oxide::inflate::decompress_to_vec_with_limit(body, length?).ok()?,
                _ => return None,
            };
            let header = number(&array, 8, 2)?;
            return array.get(10 + header..).map(<[u8]>::to_vec);
        }
        at += 46 + named? + extra? + comment?;
    }
    None
}

/// A little-endian number of `bytes` bytes.
fn number(of: &[u8], at: usize, bytes: usize) -> Option<usize> {
    let bytes = of.get(at..at + bytes)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
}
