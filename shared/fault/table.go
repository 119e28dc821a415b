package fault

import (
	"net/http"

	"google.golang.org/grpc/codes"
)

// Service identifies an HTTP service. Each service has its own REST error codes, which are a column of table
// (docs/api.md, "Errors").
type Service uint8

const (
	VM Service = iota
	Identity
	KV
	Credit
	Network
	services
)

// Shape is a REST error code with its HTTP status. An HTTP service returns it for a Fault of some Kind.
type Shape struct {
	Code   string
	Status int
}

type row struct {
	rpc  codes.Code
	rest [services]Shape
}

var (
	invalid          = Shape{"INVALID_ARGUMENT", http.StatusBadRequest}
	tooLarge         = Shape{"INVALID_ARGUMENT", http.StatusRequestEntityTooLarge}
	methodNotAllowed = Shape{"INVALID_ARGUMENT", http.StatusMethodNotAllowed}
	unauthenticated  = Shape{"UNAUTHENTICATED", http.StatusUnauthorized}
	forbidden        = Shape{"FORBIDDEN", http.StatusForbidden}
	notFound         = Shape{"NOT_FOUND", http.StatusNotFound}
	alreadyExists    = Shape{"ALREADY_EXISTS", http.StatusConflict}
	exhausted        = Shape{"RESOURCE_EXHAUSTED", http.StatusTooManyRequests}
	precondition     = Shape{"FAILED_PRECONDITION", http.StatusUnprocessableEntity}
	internal         = Shape{"INTERNAL", http.StatusInternalServerError}
	unavailable      = Shape{"SERVICE_UNAVAILABLE", http.StatusServiceUnavailable}
	kvInternal       = Shape{"INTERNAL_ERROR", http.StatusInternalServerError}
	kvRefused        = Shape{"PRECONDITION_FAILED", http.StatusPreconditionFailed}
	kvTimeout        = Shape{"TIMEOUT", http.StatusRequestTimeout}
	kvNotLeader      = Shape{"NOT_LEADER", http.StatusServiceUnavailable}
	kvProxy          = Shape{"LEADER_PROXY_FAILED", http.StatusBadGateway}
	networkInvalid   = Shape{"VALIDATION_ERROR", http.StatusBadRequest}
	networkTooLarge  = Shape{"VALIDATION_ERROR", http.StatusRequestEntityTooLarge}
	networkMethod    = Shape{"VALIDATION_ERROR", http.StatusMethodNotAllowed}
	networkConflict  = Shape{"CONFLICT", http.StatusConflict}
	unimplemented    = Shape{"UNIMPLEMENTED", http.StatusNotImplemented}
)

// table maps each Kind to its gRPC code, and to its REST code and HTTP status on each service. On VM, a code that the
// wire contract does not list for VM REST becomes INTERNAL. Identity returns SERVICE_UNAVAILABLE when its backend
// cannot be reached. KV uses only the errors that the contract lists for the key-value store, and those common to all
// HTTP services. On Credit, a failed operation returns a REST code of its own. INTERNAL in this table is for failures
// before the operation is known. On Network, the contract names VALIDATION_ERROR only; the other codes are those of VM,
// except for conflicts and for methods that are not implemented.
var table = [kinds]row{
	Internal:           {codes.Internal, [services]Shape{VM: internal, Identity: internal, KV: kvInternal, Credit: internal, Network: internal}},
	InvalidArgument:    {codes.InvalidArgument, [services]Shape{VM: invalid, Identity: invalid, KV: invalid, Credit: invalid, Network: networkInvalid}},
	Unauthenticated:    {codes.Unauthenticated, [services]Shape{VM: unauthenticated, Identity: unauthenticated, KV: unauthenticated, Credit: unauthenticated, Network: unauthenticated}},
	PermissionDenied:   {codes.PermissionDenied, [services]Shape{VM: forbidden, Identity: forbidden, KV: forbidden, Credit: forbidden, Network: forbidden}},
	NotFound:           {codes.NotFound, [services]Shape{VM: notFound, Identity: notFound, KV: notFound, Credit: notFound, Network: notFound}},
	AlreadyExists:      {codes.AlreadyExists, [services]Shape{VM: alreadyExists, Identity: alreadyExists, KV: alreadyExists, Credit: internal, Network: alreadyExists}},
	ResourceExhausted:  {codes.ResourceExhausted, [services]Shape{VM: exhausted, Identity: exhausted, KV: kvInternal, Credit: internal, Network: exhausted}},
	FailedPrecondition: {codes.FailedPrecondition, [services]Shape{VM: precondition, Identity: precondition, KV: kvRefused, Credit: internal, Network: networkConflict}},
	Aborted:            {codes.Aborted, [services]Shape{VM: internal, Identity: internal, KV: kvInternal, Credit: internal, Network: internal}},
	OutOfRange:         {codes.OutOfRange, [services]Shape{VM: internal, Identity: invalid, KV: kvInternal, Credit: internal, Network: networkInvalid}},
	Unimplemented:      {codes.Unimplemented, [services]Shape{VM: internal, Identity: internal, KV: kvInternal, Credit: internal, Network: unimplemented}},
	Unavailable:        {codes.Unavailable, [services]Shape{VM: internal, Identity: unavailable, KV: kvNotLeader, Credit: internal, Network: unavailable}},
	DeadlineExceeded:   {codes.DeadlineExceeded, [services]Shape{VM: internal, Identity: unavailable, KV: kvTimeout, Credit: internal, Network: unavailable}},
	Canceled:           {codes.Canceled, [services]Shape{VM: internal, Identity: internal, KV: kvInternal, Credit: internal, Network: internal}},
	TooLarge:           {codes.InvalidArgument, [services]Shape{VM: tooLarge, Identity: tooLarge, KV: tooLarge, Credit: tooLarge, Network: networkTooLarge}},
	MethodNotAllowed:   {codes.InvalidArgument, [services]Shape{VM: methodNotAllowed, Identity: methodNotAllowed, KV: methodNotAllowed, Credit: methodNotAllowed, Network: networkMethod}},
	BadGateway:         {codes.Unavailable, [services]Shape{VM: internal, Identity: unavailable, KV: kvProxy, Credit: internal, Network: unavailable}},
	Throttled:          {codes.ResourceExhausted, [services]Shape{VM: exhausted, Identity: exhausted, KV: exhausted, Credit: exhausted, Network: exhausted}},
}

// RPC returns the gRPC code for a fault of this kind.
func (k Kind) RPC() codes.Code {
	if k >= kinds {
		return codes.Internal
	}
	return table[k].rpc
}

// REST returns the REST error code and the HTTP status that the service s returns for a fault of this kind.
func (k Kind) REST(s Service) Shape {
	if k >= kinds {
		return internal
	}
	return table[k].rest[s]
}

// FromRPC returns the first kind whose gRPC code is c, or Internal if there is none.
func FromRPC(c codes.Code) Kind {
	for k := Internal; k < TooLarge; k++ {
		if table[k].rpc == c {
			return k
		}
	}
	return Internal
}
