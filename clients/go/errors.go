package fastps

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	pb "fastps.example/go/fastpsv1"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Kind is the category of an [Error], as in section 8 of protos/README.md.
type Kind string

// The kinds that a server sends, and three that only a client raises: Connection, Closed and VersionsLost.
const (
	UnknownTensor   Kind = "unknown_tensor"
	Shape           Kind = "shape"
	DType           Kind = "dtype"
	NonFinite       Kind = "non_finite"
	Frame           Kind = "frame"
	Config          Kind = "config"
	Precondition    Kind = "precondition"
	Capacity        Kind = "capacity"
	StaleEpoch      Kind = "stale_epoch"
	StalePush       Kind = "stale_push"
	Lease           Kind = "lease"
	Fenced          Kind = "fenced"
	UnknownOutcome  Kind = "unknown_outcome"
	Unauthenticated Kind = "unauthenticated"
	Denied          Kind = "denied"
	Unavailable     Kind = "unavailable"
	Deadline        Kind = "deadline"
	Internal        Kind = "internal"
	Connection      Kind = "connection"
	Closed          Kind = "closed"
	VersionsLost    Kind = "versions_lost"
)

// The kinds that a server sends, with their codes.
var kinds = map[Kind]codes.Code{UnknownTensor: codes.NotFound, Shape: codes.InvalidArgument, DType: codes.InvalidArgument,
	NonFinite: codes.InvalidArgument, Frame: codes.InvalidArgument, Config: codes.InvalidArgument,
	Precondition: codes.FailedPrecondition, Capacity: codes.ResourceExhausted, StaleEpoch: codes.FailedPrecondition,
	StalePush: codes.Aborted, Lease: codes.FailedPrecondition, Fenced: codes.Aborted, UnknownOutcome: codes.DataLoss,
	Unauthenticated: codes.Unauthenticated, Denied: codes.PermissionDenied, Unavailable: codes.Unavailable,
	Deadline: codes.DeadlineExceeded, Internal: codes.Internal}

// Error is every error of this package except [PartialPush], which wraps one. Get it with [errors.As].
type Error struct {
	Kind    Kind
	Message string
	// Tensor concerned; empty if none is.
	Tensor string
	// Shard that refused; -1 if none has.
	Shard int
	// Expected and Got are set where an argument or a state differs from what it must be.
	Expected, Got string
	// RetryAfter is the time after which a retry makes sense; -1 if the server names none.
	RetryAfter time.Duration
	// Lost lists the changes that a VersionsLost error reports.
	Lost []Loss

	cause error
}

// Loss is a tensor whose acknowledged changes a restarted server lacks.
type Loss struct {
	Tensor string
	Shard  int
	// Own is the number of this client's changes that are gone; -1 if it is unknown.
	Own int64
	// Seen is the newest version that the former server reported, Now the present one.
	Seen, Now uint64
}

func (l Loss) String() string {
	own := "some"
	if l.Own >= 0 {
		own = fmt.Sprint(l.Own)
	}
	return fmt.Sprintf("tensor %q on shard %d: version %d instead of %d, %s of this client's changes lost", l.Tensor, l.Shard,
		l.Now, l.Seen, own)
}

func (e *Error) Error() string {
	var text strings.Builder
	text.WriteString(e.Message)
	var where []string
	if e.Tensor != "" {
		where = append(where, fmt.Sprintf("tensor %q", e.Tensor))
	}
	if e.Shard >= 0 {
		where = append(where, fmt.Sprintf("shard %d", e.Shard))
	}
	if len(where) > 0 {
		fmt.Fprintf(&text, " (%s)", strings.Join(where, ", "))
	}
	if e.Expected != "" || e.Got != "" {
		fmt.Fprintf(&text, ": expected %s, got %s", e.Expected, e.Got)
	}
	return text.String()
}

// Unwrap returns the context's error if the call ended with its context.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus gives the error a code of gRPC, for [status.FromError] and [status.Code].
func (e *Error) GRPCStatus() *status.Status {
	code, ok := kinds[e.Kind]
	switch {
	case errors.Is(e.cause, context.Canceled) || e.Kind == Closed:
		code = codes.Canceled
	case e.cause != nil:
		code = codes.DeadlineExceeded
	case e.Kind == VersionsLost:
		code = codes.DataLoss
	case !ok: // Connection
		code = codes.Unavailable
	}
	return status.New(code, e.Error())
}

func newError(kind Kind, format string, args ...any) *Error {
	return &Error{Kind: kind, Message: fmt.Sprintf(format, args...), Shard: -1, RetryAfter: -1}
}

func (e *Error) expected(expected, got any) *Error {
	e.Expected, e.Got = fmt.Sprint(expected), fmt.Sprint(got)
	return e
}

// of returns a copy that names the tensor and the shard, unless the error does already.
func (e *Error) of(tensor string, shard int) *Error {
	named := *e
	if named.Tensor == "" {
		named.Tensor = tensor
	}
	if named.Shard < 0 {
		named.Shard = shard
	}
	return &named
}

func fromRefusal(refusal *pb.Refusal) *Error {
	kind := Kind(refusal.GetKind())
	if _, ok := kinds[kind]; !ok {
		kind = Internal
	}
	e := newError(kind, "%s", refusal.GetMessage())
	e.Tensor, e.Expected, e.Got = refusal.GetTensor(), refusal.GetExpected(), refusal.GetGot()
	if refusal != nil && refusal.Shard != nil {
		e.Shard = int(*refusal.Shard)
	}
	if refusal != nil && refusal.RetryAfterMs != nil {
		e.RetryAfter = time.Duration(min(*refusal.RetryAfterMs, uint64(time.Hour.Milliseconds()))) * time.Millisecond
	}
	return e
}

// fromStatus reads the refusal in a status. A status without one comes from the transport or a proxy.
func fromStatus(err error) *Error {
	known := status.Convert(err)
	for _, detail := range known.Details() {
		if refusal, ok := detail.(*pb.Refusal); ok {
			return fromRefusal(refusal)
		}
	}
	kind := Internal
	switch known.Code() {
	case codes.Unavailable, codes.Canceled, codes.Unknown:
		kind = Connection
	case codes.Unimplemented:
		return newError(Precondition, "Operation is not implemented or not supported: %s", known.Message())
	case codes.DeadlineExceeded:
		kind = Deadline
	case codes.Unauthenticated:
		kind = Unauthenticated
	case codes.ResourceExhausted:
		kind = Frame // of this library: a message is larger than 4 MiB
	}
	return newError(kind, "%s", known.Message())
}

// ended is the error of a call whose context is over.
func ended(ctx context.Context, address string, last *Error) *Error {
	e := newError(Deadline, "the deadline passed before %s answered", address)
	if errors.Is(ctx.Err(), context.Canceled) {
		e.Message = "the call was cancelled before " + address + " answered"
	}
	if last != nil {
		late := *last
		late.Message = e.Message + ": " + last.Message
		e = &late
	}
	e.cause = ctx.Err()
	return e
}

// passes reports whether the same request may be sent again without asking the caller.
func (e *Error) passes() bool {
	return e.Kind == Connection || (e.Kind == Unavailable || e.Kind == Unauthenticated) && e.RetryAfter >= 0
}

// conclusive reports whether the refusal of a repeat proves that no earlier copy was applied.
func (e *Error) conclusive() bool {
	switch e.Kind {
	case Shape, DType, NonFinite, Frame, Config, Fenced:
		return true
	}
	return false
}

// PartialPush is the error of a push that some slices applied, or whose outcome some slices still owe.
type PartialPush struct {
	// Reason is the first refusal, or the reason of the first doubt.
	Reason *Error
	// Receipts of the tensors that were applied whole.
	Receipts map[string]Receipt
	// Refused has one error per slice that refused.
	Refused []*Error
	// InDoubt are the slices whose outcome is not known yet.
	InDoubt []*Doubt
}

func (p *PartialPush) Error() string {
	return fmt.Sprintf("%v (%d slices refused, %d in doubt)", p.Reason, len(p.Refused), len(p.InDoubt))
}

// Unwrap returns the reason.
func (p *PartialPush) Unwrap() error { return p.Reason }
