package vm

import (
	"crypto/sha256"
	"net/http"

	"github.com/gorilla/mux"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// postNIC attaches a NIC to a VM. The body has the fields of a NIC in CreateVm, and the ID of the NIC is required.
func (s *Service) postNIC(w *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "AttachNic")
	if err != nil {
		return nil, err
	}
	var in nicBody
	raw, err := rest.Decode(r, &in)
	if err != nil {
		return nil, err
	}
	if in.ID == "" {
		return nil, fault.Invalid("id", "is required")
	}
	out, err := s.AttachNIC(r.Context(), t, id, in.nic(0), sha256.Sum256(append([]byte(r.URL.Path+"\x00"), raw...)))
	if err != nil {
		return nil, withBodyField(err)
	}
	if out.WaitEnded {
		return nil, fault.New(fault.DeadlineExceeded, "still attaching the NIC: read the VM to see the result").MayRetry()
	}
	replayed(w, out.Replayed)
	w.Status = http.StatusCreated
	return toREST(out.VM), nil
}

// deleteNIC detaches a NIC from a VM.
func (s *Service) deleteNIC(w *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "DetachNic")
	if err != nil {
		return nil, err
	}
	nic := mux.Vars(r)["nic"]
	out, err := s.DetachNIC(r.Context(), t, id, nic, pathHash(r))
	if err != nil {
		return nil, err
	}
	if out.WaitEnded {
		return nil, fault.New(fault.DeadlineExceeded, "still detaching the NIC: repeat the call").MayRetry()
	}
	replayed(w, out.Replayed)
	return rest.Deleted{ID: nic, Deleted: true}, nil
}
