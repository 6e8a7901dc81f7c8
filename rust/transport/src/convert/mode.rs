//! Group modes on the wire.

use super::fields::unknown;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::mode::{Epoch, MembershipRequest, Mode, Presence, Quorum, Robust};
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
        Mode::Sync(of) => {
            let Quorum { workers, backup, deterministic, sum, weighted, robust, .. } = of;
            let (median, trim) = match robust {
                Some(Robust::Median) => (true, 0),
                Some(Robust::TrimmedMean(trim)) => (false, trim),
                None => (false, 0),
            };
            let (kind, quorum, grace_ms, every) =
                (pb::ModeKind::ModeSync.into(), of.enough, of.grace_ms, of.every);
            let combined = pb::Mode { deterministic, sum, weighted, median, trim, ..empty };
            let (fragments, overlap) = (of.fragments, of.overlap);
            pb::Mode { kind, workers, backup, quorum, grace_ms, every, fragments, overlap, ..combined }
        }
    }
}

/// A request to join in wire form.
pub fn membership_to_wire(client: u64, group: u32, seat: &MembershipRequest) -> pb::JoinRequest {
    let (presence, Epoch { run, epoch }) = match seat.presence {
        Presence::Active => (pb::Presence::Unspecified, Epoch { run: 0, epoch: 0 }),
        Presence::Idle(epoch) => (pb::Presence::Idle, epoch),
        Presence::Rouses(epoch) => (pb::Presence::Rouses, epoch),
    };
    let (mode, rank, name) = (Some(mode_to_wire(seat.mode)), seat.rank, seat.name.clone());
    pb::JoinRequest { client, group, mode, rank, name, presence: presence.into(), run, epoch }
}

/// Reads a request to join.
pub fn membership_from_wire(join: pb::JoinRequest) -> Result<MembershipRequest> {
    let pb::JoinRequest { mode, rank, name, presence, run, epoch, .. } = join;
    let epoch = Epoch { run, epoch };
    let presence = match pb::Presence::try_from(presence) {
        Ok(pb::Presence::Unspecified) => Presence::Active,
        Ok(pb::Presence::Idle) => Presence::Idle(epoch),
        Ok(pb::Presence::Rouses) => Presence::Rouses(epoch),
        Err(_) => return Err(unknown("presence", "0, idle or rouses", presence)),
    };
    Ok(MembershipRequest { mode: mode_from_wire(mode)?, rank, name, presence })
}

/// Reads a mode. Refuses a setting that it does not have.
pub fn mode_from_wire(mode: Option<pb::Mode>) -> Result<Mode> {
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
            weighted: wire.weighted,
            robust: match wire.trim {
                _ if wire.median => Some(Robust::Median),
                0 => None,
                trim => Some(Robust::TrimmedMean(trim)),
            },
            enough: wire.quorum,
            grace_ms: wire.grace_ms,
            every: wire.every,
            fragments: wire.fragments,
            overlap: wire.overlap,
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
    Ok(mode)
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
        ("weighted", wire.weighted.into()),
        ("median", wire.median.into()),
        ("trim", wire.trim.into()),
        ("quorum", wire.quorum.into()),
        ("grace_ms", wire.grace_ms),
        ("every", wire.every),
        ("fragments", wire.fragments.into()),
        ("overlap", wire.overlap),
    ];
    let set = numbers.iter().filter(|(_, number)| *number != 0);
    set.map(|(name, number)| format!("{name}={number}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_travel() {
        let quorum = Quorum { workers: 4, backup: 1, deterministic: true, sum: true, ..Quorum::default() };
        let local =
            Quorum { workers: 4, weighted: true, enough: 3, grace_ms: 250, every: 50, ..Quorum::default() };
        let robust = Quorum { workers: 4, robust: Some(Robust::TrimmedMean(1)), ..Quorum::default() };
        for mode in [
            Mode::Sync(robust),
            Mode::Sync(Quorum { robust: Some(Robust::Median), ..robust }),
            Mode::Free,
            Mode::Bounded { staleness: 3 },
            Mode::Sync(quorum),
            Mode::Sync(local),
            Mode::Sync(Quorum { fragments: 3, overlap: 5, ..local }),
            Mode::WarmStart { steps: 7 },
        ] {
            let epoch = Epoch { run: 5, epoch: 2 };
            for presence in [Presence::Active, Presence::Idle(epoch), Presence::Rouses(epoch)] {
                let seat = MembershipRequest { mode, rank: Some(2), name: "a".to_owned(), presence };
                assert_eq!(membership_from_wire(membership_to_wire(7, 3, &seat)).unwrap(), seat);
            }
        }
        let later =
            pb::JoinRequest { mode: Some(mode_to_wire(Mode::Free)), presence: 3, ..Default::default() };
        assert_eq!(membership_from_wire(later).unwrap_err().kind, Kind::Frame);
        let both = pb::Mode { workers: 2, ..mode_to_wire(Mode::Bounded { staleness: 3 }) };
        let later = pb::Mode { kind: 99, ..pb::Mode::default() };
        for (bad, why) in [(None, Kind::Config), (Some(both), Kind::Config), (Some(later), Kind::Frame)] {
            assert_eq!(mode_from_wire(bad).unwrap_err().kind, why);
        }
    }
}
