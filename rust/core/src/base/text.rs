//! The form of values in messages: shapes as NumPy prints them, names quoted and joined, and what a terminal
//! does not show as it is, escaped.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::fmt::Write as _;

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

/// Returns whether a terminal obeys or hides a character: control characters, line separators, bidirectional
/// marks, and characters without a form. Joiners are not among them, because words and emoji need them.
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
        || matches!(c, '\u{e0000}'..='\u{e007f}')
}

/// One line of text for a terminal, with hidden characters as `\u001b`. JSON keeps its meaning.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Start of tokens; more hexadecimal digits than a name would have follow.
const TOKEN: &str = "fps_";
const TOKEN_DIGITS: usize = 8;
/// Start and end of keys and certificates as text.
const PEM: [&str; 2] = ["-----BEGIN ", "-----END "];

/// The text without tokens, keys and certificates: people paste these where a file or an address belongs.
pub fn without_secrets(text: &str) -> Cow<'_, str> {
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_hexdigit).count();
    let next = |text: &str| {
        let token = |(at, _): &(usize, &str)| digits(&text[at + TOKEN.len()..]) >= TOKEN_DIGITS;
        let token = text.match_indices(TOKEN).find(token).map(|(at, _)| {
            let from = at + TOKEN.len();
            (from, from + digits(&text[from..]))
        });
        let pem = text.find(PEM[0]).map(|at| {
            let end = text[at..]
                .rfind(PEM[1])
                .and_then(|end| Some(at + end + text[at + end..].rfind("-----")? + 5));
            (at, end.unwrap_or(text.len()))
        });
        token.into_iter().chain(pem).min()
    };
    let (mut rest, mut shown) = (text, String::new());
    while let Some((from, to)) = next(rest) {
        shown.extend([&rest[..from], "..."]);
        rest = &rest[to..];
    }
    if shown.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(shown + rest) }
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
        let begin = given.iter().zip(&other).take_while(|(a, b)| a == b).count();
        (other.len().abs_diff(given.len()) <= most).then(|| (edits(&given, &other), Reverse(begin), known))
    });
    // Of several as near, the one with the longest begin in common.
    apart
        .filter(|(edits, ..)| *edits <= most)
        .min_by_key(|(edits, begin, _)| (*edits, *begin))
        .map(|near| near.2)
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
    fn secrets_are_left_out() {
        let token = format!("fps_{}", "0aF9".repeat(18));
        let pem = "-----BEGIN PRIVATE KEY-----\\nMIIB\\n-----END PRIVATE KEY-----";
        for (text, shown) in [
            ("a tensor fps_mean, got fps_12".to_owned(), "a tensor fps_mean, got fps_12"),
            (format!("cannot read {token}: fps_mean"), "cannot read fps_...: fps_mean"),
            (format!("{token},{token}:70"), "fps_...,fps_...:70"),
            (format!("cannot read {pem}: {token}"), "cannot read ...: fps_..."),
            (format!("{pem}\n{pem}: no"), "...: no"),
            (format!("cannot read {}", &pem[..40]), "cannot read ..."),
        ] {
            assert_eq!(without_secrets(&text), shown, "{text}");
        }
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
        for known in [["rm", "run"], ["run", "rm"]] {
            assert_eq!(nearest("rum", known), Some("run"), "both are one letter away");
        }
        assert_eq!(nearest(&"x".repeat(1024), ["x"]), None);
    }
}
