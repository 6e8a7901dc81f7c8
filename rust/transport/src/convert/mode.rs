//! Group modes on the wire.

use super::fields::unknown;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::mode::{MembershipRequest, Mode, Quorum};
use fastps_proto::v1 as pb;

/// A mode in wire form.
pub fn mode_to_wire(mode: Mode) -> pb::Mode {
    let empty = pb::Mode::default();
    match mode {
        Mode::Free => pb::Mode { kind: pb::ModeKind::ModeFree.into(), ..empty },
        Mode::Bounded { staleness } => {
            pb::Mode { kind: pb::ModeKind::ModeBounded.into(), staleness, ..empty }
        }
        Mode::WarmStart { steps } => pb::Mode { kind: pb::ModeKind::ModeWarmStart.into(), steps, ..empty },
        Mode::Sync(Quorum { workers, backup, deterministic, sum }) => {
            pb::Mode { kind: pb::ModeKind::ModeSync.into(), workers, backup, deterministic, sum, ..empty }
        }
    }
}

/// Reads a request to join. Refuses a setting that its mode does not have.
pub fn membership_from_wire(
    mode: Option<pb::Mode>,
    rank: Option<u32>,
    name: String,
) -> Result<MembershipRequest> {
    let wire = mode.unwrap_or_default();
    let kind = pb::ModeKind::try_from(wire.kind)
        .map_err(|_| unknown("mode.kind", "free, bounded, sync or warm start", wire.kind))?;
    let mode = match kind {
        pb::ModeKind::ModeFree => Mode::Free,
        pb::ModeKind::ModeBounded => Mode::Bounded { staleness: wire.staleness },
        pb::ModeKind::ModeWarmStart => Mode::WarmStart { steps: wire.steps },
        pb::ModeKind::ModeSync => Mode::Sync(Quorum {
            workers: wire.workers,
            backup: wire.backup,
            deterministic: wire.deterministic,
            sum: wire.sum,
        }),
        pb::ModeKind::ModeUnspecified => {
            return Err(Error::new(Kind::Config, "a place in a group has a mode")
                .expected("free, bounded, sync or warm start", wire.kind));
        }
    };
    if mode_to_wire(mode) != wire {
        return Err(Error::new(Kind::Config, "the mode has settings of another mode")
            .expected(mode, settings_of(&wire)));
    }
    Ok(MembershipRequest { mode, rank, name })
}

/// The settings of a mode on the wire.
fn settings_of(wire: &pb::Mode) -> String {
    let numbers = [
        ("staleness", wire.staleness),
        ("workers", wire.workers.into()),
        ("backup", wire.backup.into()),
        ("deterministic", wire.deterministic.into()),
        ("sum", wire.sum.into()),
        ("steps", wire.steps),
    ];
    let set = numbers.iter().filter(|(_, number)| *number != 0);
    set.map(|(name, number)| format!("{name}={number}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_travel() {
        let quorum = Quorum { workers: 4, backup: 1, deterministic: true, sum: true };
        for mode in
            [Mode::Free, Mode::Bounded { staleness: 3 }, Mode::Sync(quorum), Mode::WarmStart { steps: 7 }]
        {
            let seat = membership_from_wire(Some(mode_to_wire(mode)), Some(2), "a".to_owned()).unwrap();
            assert_eq!(seat, MembershipRequest { mode, rank: Some(2), name: "a".to_owned() });
        }
        let both = pb::Mode { workers: 2, ..mode_to_wire(Mode::Bounded { staleness: 3 }) };
        let later = pb::Mode { kind: 99, ..pb::Mode::default() };
        for (bad, why) in [(None, Kind::Config), (Some(both), Kind::Config), (Some(later), Kind::Frame)] {
            assert_eq!(membership_from_wire(bad, None, String::new()).unwrap_err().kind, why);
        }
    }
}
