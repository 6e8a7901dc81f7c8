//! Which segments follow each other.

use crate::tools::copy::past::Sealed;
use std::collections::BTreeMap;

/// The segments from `first` on, as they follow each other, and the one that is missing before the last, if any
/// is. `first` need not be there if no later one is.
pub fn chain(segments: &BTreeMap<u64, Sealed>, first: u64) -> (Vec<Sealed>, Option<u64>) {
    let (mut found, mut next) = (Vec::new(), first);
    while let Some(segment) = segments.get(&next) {
        found.push(segment.clone());
        next = match segment.next {
            // The log broke off there.
            0 => match segments.range(next + 1..).next() {
                Some((later, _)) => *later,
                None => return (found, None),
            },
            next => next,
        };
    }
    let missing = segments.range(next..).next().map(|_| next);
    (found, missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(of: &[(u64, u64)]) -> BTreeMap<u64, Sealed> {
        let one = |(number, next): &(u64, u64)| {
            (*number, Sealed { number: *number, next: *next, bytes: 0, crc32c: 0, time: 0 })
        };
        of.iter().map(one).collect()
    }

    #[test]
    fn a_gap_is_found_wherever_it_is() {
        for (of, first, found, missing) in [
            (&[][..], 3, &[][..], None),
            (&[(1, 2), (2, 3)], 1, &[1, 2], None),
            (&[(1, 2), (2, 3)], 2, &[2], None),
            (&[(1, 2), (2, 3)], 3, &[], None),
            (&[(1, 2), (3, 4)], 1, &[1], Some(2)),
            (&[(1, 2), (3, 4)], 3, &[3], None),
            (&[(2, 3), (3, 4)], 1, &[], Some(1)),
            // A number that was skipped, and a log that broke off.
            (&[(1, 4), (4, 5)], 1, &[1, 4], None),
            (&[(1, 0), (4, 5)], 1, &[1, 4], None),
            (&[(1, 2), (2, 0)], 1, &[1, 2], None),
        ] {
            let (chained, gap) = chain(&segments(of), first);
            let numbers: Vec<_> = chained.iter().map(|segment| segment.number).collect();
            assert_eq!((numbers.as_slice(), gap), (found, missing), "{of:?} from {first}");
        }
    }
}
