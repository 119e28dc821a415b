package edge

import (
	"errors"
	"fmt"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// VPCError is an error that concerns one VPC only.
type VPCError struct {
	VPC cloud.VPCID
	Err error
}

func (e *VPCError) Error() string { return fmt.Sprintf("VPC %s: %v", e.VPC, e.Err) }
func (e *VPCError) Unwrap() error { return e.Err }

// ErrorsOf splits an error of Set. The result own joins the errors of the VPC id, and general joins the errors that
// concern no single VPC. Errors of other VPCs are dropped.
func ErrorsOf(err error, id cloud.VPCID) (own, general error) {
	switch e := err.(type) {
	case nil:
		return nil, nil
	case *VPCError:
		if e.VPC == id {
			own = e
		}
		return own, nil
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			o, g := ErrorsOf(one, id)
			own, general = errors.Join(own, o), errors.Join(general, g)
		}
		return own, general
	}
	if errors.As(err, new(*VPCError)) {
		return ErrorsOf(errors.Unwrap(err), id)
	}
	return nil, err
}
