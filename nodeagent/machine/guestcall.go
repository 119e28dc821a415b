package machine

import (
	"context"
	"errors"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// maxProgramTime is the maximum time for which CallGuest waits for a program in the guest.
const maxProgramTime = 10 * time.Minute

// CallGuest sends a request to the guest agent in a VM, and returns the result. Its error is for the tenant, and has no
// secrets of the request.
func (s *MachineSet) CallGuest(ctx context.Context, r *agentv1.GuestRequest) (*agentv1.GuestResult, error) {
	p, err := s.process(cloud.VMID(r.GetVmId()))
	if err != nil {
		return nil, err
	}
	switch {
	case r.GetPassword() != nil:
		q := r.GetPassword()
		return &agentv1.GuestResult{}, p.SetGuestPassword(ctx, q.GetUsername(), q.GetPassword())
	case r.GetSshKeys() != nil:
		q := r.GetSshKeys()
		return &agentv1.GuestResult{}, p.AddGuestSSHKeys(ctx, q.GetUsername(), q.GetKeys(), q.GetReplace())
	case len(r.GetCommand().GetCommand()) > 0:
		q := r.GetCommand()
		within := min(time.Duration(q.GetTimeoutSeconds())*time.Second, maxProgramTime)
		program := qemu.GuestProgram{Path: q.GetCommand()[0], Args: q.GetCommand()[1:], Stdin: q.GetStdin()}
		exit, err := p.RunInGuest(ctx, program, within)
		if errors.Is(err, qemu.ErrGuestTimeout) {
			return &agentv1.GuestResult{TimedOut: true}, nil
		}
		return &agentv1.GuestResult{
			ExitCode: exit.Code, Signal: exit.Signal, Stdout: exit.Output, Stderr: exit.Errors, StdoutTruncated: exit.OutputCut,
			StderrTruncated: exit.ErrorsCut,
		}, err
	}
	return nil, errors.New("this host's agent does not support this call: an operator must upgrade it")
}

// shutDownWithin is the maximum time for which shutDownGuest waits for the guest agent. A request to power the VM off
// waits as long.
const shutDownWithin = 3 * time.Second

// shutDownGuest asks the guest agent, if one answers, to shut the guest down. It is for guests that ignore the power
// button. An error is not reported, because the guest may shut down because of the power button.
func (v *VM) shutDownGuest(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, shutDownWithin)
	defer cancel()
	_ = v.process.ShutDownGuest(ctx)
}
