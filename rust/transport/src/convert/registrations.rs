//! How many registrations one message carries: both ends count in the same way, so a client never sends a
//! page that a server refuses, and no answer exceeds a message.

use fastps_proto::v1 as pb;
use prost::Message;

/// Most tensors that one `Register` or `Reserve` names.
pub const MAX_REGISTERED: usize = 4096;
/// Most registrations of one client that are under way, and most that one `Seal` or `Commit` names.
pub const MAX_RESERVATIONS: usize = 1 << 14;
/// Bytes of the specifications and places that messages about several tensors carry.
pub const MAX_REGISTERED_BYTES: usize = 2 << 20;

/// Message bytes of one tensor beside its specification and its places.
const TENSOR_BYTES: usize = 64;
/// Message bytes of a slice: identifier, shard and index.
const PLACE_BYTES: usize = 24;

/// The bytes of a tensor with so many slices in the messages of its registration.
pub fn registered_bytes(spec: &pb::TensorSpec, slices: usize) -> usize {
    spec.encoded_len() + TENSOR_BYTES + PLACE_BYTES * slices
}

/// Divides tensors, given their [`registered_bytes`], into pages of one message each. A page of one tensor
/// may be longer than others.
pub fn pages(bytes: impl IntoIterator<Item = usize>) -> Vec<std::ops::Range<usize>> {
    let (mut pages, mut begin, mut length, mut end) = (Vec::new(), 0, 0_usize, 0);
    for more in bytes {
        if end > begin
            && (end - begin >= MAX_REGISTERED || length.saturating_add(more) > MAX_REGISTERED_BYTES)
        {
            pages.push(begin..end);
            (begin, length) = (end, 0);
        }
        length = length.saturating_add(more);
        end += 1;
    }
    if end > begin {
        pages.push(begin..end);
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_hold_all_tensors_in_order_within_their_bounds() {
        let large = MAX_REGISTERED_BYTES;
        let cases: [(Vec<usize>, Vec<usize>); 6] = [
            (vec![], vec![]),
            (vec![1], vec![1]),
            (vec![1; 2 * MAX_REGISTERED + 1], vec![MAX_REGISTERED, MAX_REGISTERED, 1]),
            (vec![large / 2; 5], vec![2, 2, 1]),
            (vec![1, large, 1, 2 * large, 1], vec![1, 1, 1, 1, 1]),
            (vec![usize::MAX, usize::MAX], vec![1, 1]),
        ];
        for (bytes, lengths) in cases {
            let count = bytes.len();
            let pages = pages(bytes);
            assert_eq!(pages.iter().map(ExactSizeIterator::len).collect::<Vec<_>>(), lengths);
            assert_eq!(pages.into_iter().flatten().collect::<Vec<_>>(), (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_tensor_is_counted_for_more_bytes_than_its_messages_have() {
        let spec = pb::TensorSpec { name: "n".repeat(1024), shape: vec![u64::MAX; 32], ..Default::default() };
        for slices in [1, 7, 1000] {
            let placement = pb::Placement {
                slices: vec![u64::MAX; slices],
                shards: vec![u32::MAX; slices],
                group: u32::MAX,
            };
            let most = registered_bytes(&spec, slices);
            let reservation = pb::Reservation {
                reservation: u64::MAX,
                spec: Some(spec.clone()),
                slices: vec![u64::MAX; slices],
                indices: vec![1 << 18; slices],
                group: u32::MAX,
            };
            let asked = pb::ReserveRequest { reservations: vec![reservation], ..Default::default() };
            assert!(asked.encoded_len() <= most, "{slices}");
            let entry = pb::MapEntry { spec: Some(spec.clone()), placement: Some(placement.clone()) };
            let registrations = vec![pb::Registration { entry: Some(entry) }];
            let told = pb::SettleResponse { registrations, ..Default::default() };
            assert!(told.encoded_len() <= most, "{slices}");
            let outcome = pb::RegisterResponse {
                reservation: u64::MAX,
                placement: Some(placement),
                ..Default::default()
            };
            let answer = pb::RegisterResponse { outcomes: vec![outcome], ..Default::default() };
            assert!(answer.encoded_len() <= most, "{slices}");
        }
    }
}
