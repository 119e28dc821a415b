package session

import (
	"regexp"

	"google.golang.org/grpc/status"
)

// generatedID matches an ID that the control plane generates.
var generatedID = regexp.MustCompile(`\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b`)

// WithNames returns err with the IDs in the message of its gRPC status replaced by names. The function nameOf returns
// the name of an object by its ID, or the ID if it knows no name. It is called only if the message has an ID.
func WithNames(err error, nameOf func(id string) string) error {
	s, ok := status.FromError(err)
	if !ok || !generatedID.MatchString(s.Message()) {
		return err
	}
	p := s.Proto()
	p.Message = generatedID.ReplaceAllStringFunc(p.GetMessage(), nameOf)
	return status.ErrorProto(p)
}
