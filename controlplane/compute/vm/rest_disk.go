package vm

import (
	"crypto/sha256"
	"net/http"

	"github.com/gorilla/mux"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// postDisk attaches a volume to a VM. The body has the fields of a disk in CreateVm.
func (s *Service) postDisk(w *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "AttachDisk")
	if err != nil {
		return nil, err
	}
	var in diskBody
	raw, err := rest.Decode(r, &in)
	if err != nil {
		return nil, err
	}
	d, err := in.disk("")
	if err != nil {
		return nil, err
	}
	out, err := s.AttachDisk(r.Context(), t, id, d, sha256.Sum256(append([]byte(r.URL.Path+"\x00"), raw...)))
	if err != nil {
		return nil, withBodyField(err)
	}
	if out.WaitEnded {
		return nil, fault.New(fault.DeadlineExceeded, "still attaching the disk: read the VM to see the result").MayRetry()
	}
	replayed(w, out.Replayed)
	w.Status = http.StatusCreated
	return toREST(out.VM), nil
}

// deleteDisk detaches a volume from a VM.
func (s *Service) deleteDisk(w *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "DetachDisk")
	if err != nil {
		return nil, err
	}
	disk := mux.Vars(r)["disk"]
	out, err := s.DetachDisk(r.Context(), t, id, disk, pathHash(r))
	if err != nil {
		return nil, err
	}
	if out.WaitEnded {
		return nil, fault.New(fault.DeadlineExceeded, "still detaching the disk: repeat the call").MayRetry()
	}
	replayed(w, out.Replayed)
	return rest.Deleted{ID: disk, Deleted: true}, nil
}
