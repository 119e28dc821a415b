package vm

import (
	"net/http"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (s *Service) startVM(w *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "StartVm")
	if err != nil {
		return nil, err
	}
	// A start that has not finished in time is not an error here, because the desired state is stored.
	out, err := s.Start(r.Context(), t, id, pathHash(r))
	if err != nil {
		return nil, err
	}
	replayed(w, out.Replayed)
	return actionResponse{id, "started"}, nil
}

func (s *Service) stopVM(w *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "StopVm")
	if err != nil {
		return nil, err
	}
	out, err := s.Stop(r.Context(), t, id, cloud.DefaultStop*time.Millisecond, pathHash(r))
	if err != nil {
		return nil, err
	}
	if out.WaitEnded {
		return nil, fault.New(fault.DeadlineExceeded, "still stopping: the stop goes on; repeat the call to wait for it").MayRetry()
	}
	replayed(w, out.Replayed)
	return actionResponse{id, "stopped"}, nil
}

func (s *Service) rebootVM(w *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "RebootVm")
	if err != nil {
		return nil, err
	}
	out, err := s.Reboot(r.Context(), t, id, pathHash(r))
	if err != nil {
		return nil, err
	}
	if out.WaitEnded {
		return nil, fault.New(fault.DeadlineExceeded, "still rebooting: read the VM to see the result").MayRetry()
	}
	replayed(w, out.Replayed)
	return actionResponse{id, "rebooted"}, nil
}

func (s *Service) resetVM(w *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "ResetVm")
	if err != nil {
		return nil, err
	}
	out, err := s.Reset(r.Context(), t, id, pathHash(r))
	if err != nil {
		return nil, err
	}
	if out.WaitEnded {
		return nil, fault.New(fault.DeadlineExceeded, "still resetting: read the VM to see the result").MayRetry()
	}
	replayed(w, out.Replayed)
	return actionResponse{id, "reset"}, nil
}
