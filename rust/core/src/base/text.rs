//! The form of values in messages: shapes as NumPy prints them, names quoted and joined.

/// A shape, such as `(2, 3)`, `(3,)` or `()`.
pub fn shape(sizes: &[u64]) -> String {
    match sizes {
        [one] => format!("({one},)"),
        _ => format!("({})", join(sizes.iter().map(u64::to_string))),
    }
}

/// Names, each in quotes, such as `"a", "b"`; `none` if there are none.
pub fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let quoted = join(names.into_iter().map(|name| format!("{name:?}")));
    if quoted.is_empty() { "none".to_owned() } else { quoted }
}

fn join(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_names_read_as_in_python() {
        assert_eq!([shape(&[]), shape(&[3]), shape(&[2, 3])], ["()", "(3,)", "(2, 3)"]);
        assert_eq!([names([]), names(["a"]), names(["a", "b"])], ["none", "\"a\"", "\"a\", \"b\""]);
    }
}
