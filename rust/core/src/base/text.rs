//! The form of values in messages: shapes as NumPy prints them, names quoted and joined.

/// Longer names, in letters, and more names are not compared: an error must not take long.
const LONGEST: usize = 256;
const MOST_NAMES: usize = 10_000;

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

/// The name for which a misspelt one most likely stands: in any case, at most every third letter differs.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let letters = |name: &str| name.to_lowercase().chars().collect::<Vec<_>>();
    let given = letters(name);
    if given.len() > LONGEST {
        return None;
    }
    let most = given.len().div_ceil(3);
    let apart = known.into_iter().take(MOST_NAMES).filter_map(|known| {
        let other = letters(known);
        (other.len().abs_diff(given.len()) <= most).then(|| (edits(&given, &other), known))
    });
    apart.filter(|(edits, _)| *edits <= most).min_by_key(|(edits, _)| *edits).map(|(_, known)| known)
}

/// The number of letters to insert, delete or replace (Levenshtein).
fn edits(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let best = (diagonal + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], best);
        }
    }
    row[b.len()]
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

    #[test]
    fn the_nearest_name_is_found() {
        let known = ["layer.weight", "layer.bias", "w"];
        for (given, expected) in [
            ("layer.weigth", Some("layer.weight")),
            ("Layer.Bias", Some("layer.bias")),
            ("layerbias", Some("layer.bias")),
            ("v", Some("w")),
            ("embedding", None),
            ("", None),
        ] {
            assert_eq!(nearest(given, known), expected, "{given}");
        }
        assert_eq!(nearest(&"x".repeat(1024), ["x"]), None);
    }
}
