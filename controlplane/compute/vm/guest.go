package vm

import (
	"cmp"
	"context"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Limits of the requests to guest agents, in bytes unless they are numbers of things.
const (
	maxGuestPassword  = 128
	maxGuestKeys      = 32
	maxGuestKeyBytes  = 16 << 10
	maxCommandStrings = 64
	maxCommandBytes   = 16 << 10
	maxCommandInput   = 64 << 10
	// defaultGuestTimeout and maxGuestTimeout are for programs in guests, in seconds.
	defaultGuestTimeout = 30
	maxGuestTimeout     = 300
)

var guestUser = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9._-]{0,31}$`)

func checkGuestUser(name string) error {
	if !guestUser.MatchString(name) {
		return fault.Invalid("username", "must be 1 to 32 letters, digits and ._-, and begin with a letter or _")
	}
	return nil
}

// SetGuestPassword sets the password of a user in the guest of a running VM. The password is not stored.
func (s *Service) SetGuestPassword(ctx context.Context, t cloud.Tenant, id cloud.VMID, user, password string) error {
	if err := checkGuestUser(user); err != nil {
		return err
	}
	if password == "" || len(password) > maxGuestPassword || !utf8.ValidString(password) ||
		strings.ContainsFunc(password, unicode.IsControl) {
		return fault.Invalid("password", "must be 1 to %d bytes of UTF-8 without control characters", maxGuestPassword)
	}
	_, err := s.callGuest(ctx, t, id, "", &agentv1.GuestRequest{Call: &agentv1.GuestRequest_Password{
		Password: &agentv1.GuestPassword{Username: user, Password: password},
	}})
	return err
}

// AddGuestSSHKeys adds public keys to those of a user in the guest of a running VM, or replaces the keys of the user.
func (s *Service) AddGuestSSHKeys(
	ctx context.Context, t cloud.Tenant, id cloud.VMID, user string, keys []string, replace bool,
) error {
	if err := checkGuestUser(user); err != nil {
		return err
	}
	if len(keys) == 0 || len(keys) > maxGuestKeys {
		return fault.Invalid("keys", "must be 1 to %d, got %d", maxGuestKeys, len(keys))
	}
	if n := len(strings.Join(keys, "")); n > maxGuestKeyBytes {
		return fault.Invalid("keys", "must be at most %d bytes together, got %d", maxGuestKeyBytes, n)
	}
	for _, key := range keys {
		if err := cloudinit.CheckSSHKey(key); err != nil {
			return fault.Invalid("keys", "a key %s", err)
		}
	}
	_, err := s.callGuest(ctx, t, id, "", &agentv1.GuestRequest{Call: &agentv1.GuestRequest_SshKeys{
		SshKeys: &agentv1.GuestSshKeys{Username: user, Keys: keys, Replace: replace},
	}})
	return err
}

// guestProgram is a program that RunInGuest runs.
type guestProgram struct {
	// command is the program and its arguments.
	command []string
	stdin   []byte
	// seconds is the maximum wait for the program's end, or 0 for defaultGuestTimeout.
	seconds uint32
}

func (p guestProgram) check() error {
	command := p.command
	if len(command) == 0 || len(command) > maxCommandStrings || command[0] == "" {
		return fault.Invalid("command", "must be a program and its arguments: 1 to %d strings", maxCommandStrings)
	}
	if n := len(strings.Join(command, "")); n > maxCommandBytes {
		return fault.Invalid("command", "must be at most %d bytes, got %d", maxCommandBytes, n)
	}
	if slices.ContainsFunc(command, func(s string) bool { return !utf8.ValidString(s) || strings.Contains(s, "\x00") }) {
		return fault.Invalid("command", "must be UTF-8 without the character 0")
	}
	if n := len(p.stdin); n > maxCommandInput {
		return fault.Invalid("stdin", "must be at most %d bytes, got %d", maxCommandInput, n)
	}
	if p.seconds > maxGuestTimeout {
		return fault.Invalid("timeout_seconds", "must be at most %d, got %d", maxGuestTimeout, p.seconds)
	}
	return nil
}

// RunInGuest runs a program in the guest of a running VM, and waits for its end. The VM must have the metadata
// cloud.GuestExec with the value "allowed".
func (s *Service) RunInGuest(
	ctx context.Context, t cloud.Tenant, id cloud.VMID, p guestProgram,
) (*agentv1.GuestResult, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	seconds := cmp.Or(p.seconds, defaultGuestTimeout)
	out, err := s.callGuest(ctx, t, id, cloud.GuestExec, &agentv1.GuestRequest{Call: &agentv1.GuestRequest_Command{
		Command: &agentv1.GuestCommand{Command: p.command, TimeoutSeconds: seconds, Stdin: p.stdin},
	}})
	if err != nil {
		return nil, err
	}
	if out.GetTimedOut() {
		return nil, fault.New(fault.DeadlineExceeded,
			"the program has not ended within %d s, and may run on in the guest", seconds)
	}
	return out, nil
}

// callGuest sends a request to the guest agent in a running VM. Unless permission is empty, the metadata of the VM must
// have this key with the value "allowed".
func (s *Service) callGuest(
	ctx context.Context, t cloud.Tenant, id cloud.VMID, permission string, r *agentv1.GuestRequest,
) (*agentv1.GuestResult, error) {
	vm, err := s.Get(ctx, t, id)
	if err != nil {
		return nil, err
	}
	if permission != "" && vm.Metadata[permission] != "allowed" && !mutant.On(mutant.ExecUnpermitted) {
		return nil, fault.New(fault.FailedPrecondition,
			"VM %s does not allow commands in its guest: set its metadata %s=allowed first", vm.Name, permission).
			WithReason("GUEST_EXEC_NOT_ALLOWED")
	}
	if vm.State != cloud.Running {
		return nil, errNotRunning(vm)
	}
	r.VmId = string(id)
	out, err := s.opts.Nodes.CallGuest(ctx, t, vm.Node, r)
	if f, ok := fault.From(err); ok && f.Kind == fault.FailedPrecondition && f.Reason == "" {
		return nil, f.WithReason(auth.GuestCallFailed)
	}
	return out, err
}

// errNotRunning returns the error for a call of the guest agent in a VM that is not RUNNING.
func errNotRunning(vm *cloud.VM) error {
	if vm.State == cloud.Migrating {
		return fault.New(fault.FailedPrecondition,
			"VM %s is being migrated: repeat the call when it is RUNNING again", vm.Name).MayRetry()
	}
	return fault.New(fault.FailedPrecondition, "start VM %s first: it is %s", vm.Name, vm.State)
}
