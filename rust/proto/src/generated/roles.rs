// Generated from the options of protos/fastps/v1/fastps.proto.

use crate::v1;

/// A request of a call, which needs a role.
pub trait NeedsRole {
    /// The least role that may make the call.
    const ROLE: v1::Role;
}

/// fastps.v1.Control.Hello
impl NeedsRole for v1::HelloRequest {
    const ROLE: v1::Role = v1::Role::Reader;
}

/// fastps.v1.Control.GetMap
impl NeedsRole for v1::GetMapRequest {
    const ROLE: v1::Role = v1::Role::Reader;
}

/// fastps.v1.Control.Register
impl NeedsRole for v1::RegisterRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Reserve
impl NeedsRole for v1::ReserveRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Seal
impl NeedsRole for v1::SealRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Commit
impl NeedsRole for v1::CommitRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Settle
impl NeedsRole for v1::SettleRequest {
    const ROLE: v1::Role = v1::Role::Server;
}

/// fastps.v1.Control.Unregister
impl NeedsRole for v1::UnregisterRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Drop
impl NeedsRole for v1::DropRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Stats
impl NeedsRole for v1::StatsRequest {
    const ROLE: v1::Role = v1::Role::Reader;
}

/// fastps.v1.Control.Join
impl NeedsRole for v1::JoinRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Leave
impl NeedsRole for v1::LeaveRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Advance
impl NeedsRole for v1::AdvanceRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Portion
impl NeedsRole for v1::PortionRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.OpenSpace
impl NeedsRole for v1::OpenSpaceRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.CloseSpace
impl NeedsRole for v1::CloseSpaceRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.ListSpaces
impl NeedsRole for v1::ListSpacesRequest {
    const ROLE: v1::Role = v1::Role::Reader;
}

/// fastps.v1.Control.Coordinate
impl NeedsRole for v1::CoordinateRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Batch
impl NeedsRole for v1::BatchRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.BatchPortion
impl NeedsRole for v1::BatchPortionRequest {
    const ROLE: v1::Role = v1::Role::Worker;
}

/// fastps.v1.Control.Checkpoint
impl NeedsRole for v1::CheckpointRequest {
    const ROLE: v1::Role = v1::Role::Admin;
}

/// fastps.v1.Control.Hold
impl NeedsRole for v1::HoldRequest {
    const ROLE: v1::Role = v1::Role::Admin;
}

/// fastps.v1.Control.Mark
impl NeedsRole for v1::MarkRequest {
    const ROLE: v1::Role = v1::Role::Admin;
}

/// fastps.v1.Data.Exchange
impl NeedsRole for v1::Frame {
    const ROLE: v1::Role = v1::Role::Reader;
}

/// The least role that may send a frame of this kind; unspecified: no client sends it.
pub const fn role_of(kind: v1::Kind) -> v1::Role {
    match kind {
        v1::Kind::Unspecified => v1::Role::Unspecified,
        v1::Kind::Gradient => v1::Role::Worker,
        v1::Kind::Assign => v1::Role::Worker,
        v1::Kind::Pull => v1::Role::Reader,
        v1::Kind::PullState => v1::Role::Worker,
        v1::Kind::AssignState => v1::Role::Worker,
        v1::Kind::Resolve => v1::Role::Worker,
        v1::Kind::Delta => v1::Role::Worker,
        v1::Kind::Vector => v1::Role::Worker,
        v1::Kind::PullVersion => v1::Role::Reader,
        v1::Kind::Portion => v1::Role::Worker,
        v1::Kind::Receipt => v1::Role::Unspecified,
        v1::Kind::Values => v1::Role::Unspecified,
        v1::Kind::Refused => v1::Role::Unspecified,
        v1::Kind::Fenced => v1::Role::Unspecified,
        v1::Kind::Version => v1::Role::Unspecified,
        v1::Kind::Scalars => v1::Role::Unspecified,
    }
}
