package qemu

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// guestCallWithin is the maximum time of one command of the guest agent, including the wait for other clients.
	guestCallWithin = 10 * time.Second
	// firstPoll and lastPoll are the shortest and the longest pause between two queries for the end of a program.
	firstPoll = 100 * time.Millisecond
	lastPoll  = time.Second
	// maxOutput is the maximum number of bytes of the output and of the error output of a program that are kept.
	maxOutput = 768 << 10
	// maxStatusReplies is the maximum number of bytes that are read of all replies about the state of one program. The
	// last reply has the output: qemu-ga sends at most 16 MiB of each of the two outputs, in base64. The other replies are
	// short.
	maxStatusReplies = 48 << 20
	// maxRefusal is the maximum length of an error text of a guest agent in an error of this package, in bytes.
	maxRefusal = 200
)

// Errors of calls of the guest agent. Callers show them to tenants.
var (
	// ErrNoGuestAgent means that no program in the guest has opened the port of the guest agent.
	ErrNoGuestAgent = errors.New("no guest agent runs in the guest: " +
		"install the package qemu-guest-agent there and start its service")
	errGuestSilent = errors.New("the guest agent in the guest does not answer, or its answer is invalid: " +
		"restart its service, qemu-guest-agent")
	errFrozen          = errors.New("the guest's file systems are frozen for a snapshot: try again")
	errProgramMigrated = errors.New("the VM is being migrated, and the result of the program is lost: " +
		"the program may run on in the guest")
	errProgramStopped = errors.New("the VM was stopped or migrated while the program ran, and the result of the program " +
		"is lost")
	// ErrGuestTimeout means that a program in the guest has not ended in time. It may run on.
	ErrGuestTimeout = errors.New("the program has not ended in time")
)

// callGuest runs one command of the guest agent on a connection of its own. The function use runs the command.
func (p *Process) callGuest(ctx context.Context, use func(context.Context, *guestConn) error) error {
	ctx, cancel := context.WithTimeout(ctx, guestCallWithin)
	defer cancel()
	defer context.AfterFunc(p.life, cancel)()
	if open, err := p.agentPortOpen(ctx); err == nil && !open {
		return ErrNoGuestAgent
	}
	if p.frozen() {
		return errFrozen // do not connect: the thaw needs the port, which serves one client
	}
	g, err := p.dialGuest(ctx)
	if err != nil {
		return errGuestSilent
	}
	defer g.Close()
	defer context.AfterFunc(ctx, func() { _ = g.SetDeadline(time.Unix(1, 0)) })()
	if p.frozen() { // freeze may have had the port before
		return errFrozen
	}
	err = use(ctx, g)
	var refused *agentError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refused):
		return fmt.Errorf("the guest agent refused the request: %s", printable(refused.text, maxRefusal))
	}
	return errGuestSilent
}

// frozen reports whether the guest's file systems may be frozen.
func (p *Process) frozen() bool {
	_, err := os.Lstat(p.home.path(frozenName))
	return !errors.Is(err, fs.ErrNotExist)
}

// SetGuestPassword sets the password of a user of the guest.
func (p *Process) SetGuestPassword(ctx context.Context, user, password string) error {
	args := struct {
		User     string `json:"username"`
		Password []byte `json:"password"` // in base64
		Crypted  bool   `json:"crypted"`
	}{user, []byte(password), false}
	return p.callGuest(ctx, func(ctx context.Context, g *guestConn) error {
		return g.call(ctx, guestCallWithin, "guest-set-user-password", args, nil)
	})
}

// AddGuestSSHKeys adds public keys to those with which a user can log in to the guest, or replaces these keys.
func (p *Process) AddGuestSSHKeys(ctx context.Context, user string, keys []string, replace bool) error {
	args := struct {
		User  string   `json:"username"`
		Keys  []string `json:"keys"`
		Reset bool     `json:"reset"`
	}{user, keys, replace}
	return p.callGuest(ctx, func(ctx context.Context, g *guestConn) error {
		return g.call(ctx, guestCallWithin, "guest-ssh-add-authorized-keys", args, nil)
	})
}

// ShutDownGuest asks the guest agent, if one runs in the guest, to shut the guest down. The guest agent sends no answer
// if it does so.
func (p *Process) ShutDownGuest(ctx context.Context) error {
	args := struct {
		Mode string `json:"mode"`
	}{"powerdown"}
	return p.callGuest(ctx, func(ctx context.Context, g *guestConn) error {
		return g.send(ctx, guestCallWithin, "guest-shutdown", args)
	})
}

// GuestProgram is a program that RunInGuest runs.
type GuestProgram struct {
	Path  string
	Args  []string
	Stdin []byte
}

// GuestExit describes how a program in the guest ended.
type GuestExit struct {
	Code, Signal int32
	// Output and Errors are the first maxOutput bytes of the output and the error output. OutputCut and ErrorsCut are
	// true if there was more.
	Output, Errors       []byte
	OutputCut, ErrorsCut bool
}

// RunInGuest runs a program in the guest and waits for its end for the duration within. It returns ErrGuestTimeout if
// the program has not ended by then. If ctx ends earlier, the program may run on.
func (p *Process) RunInGuest(ctx context.Context, program GuestProgram, within time.Duration) (GuestExit, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, within, ErrGuestTimeout)
	defer cancel()
	command := struct {
		Path    string   `json:"path"`
		Args    []string `json:"arg,omitempty"`
		Stdin   []byte   `json:"input-data,omitempty"` // in base64
		Capture bool     `json:"capture-output"`
	}{program.Path, program.Args, program.Stdin, true}
	var started struct {
		PID int64 `json:"pid"`
	}
	if err := p.callGuest(ctx, func(ctx context.Context, g *guestConn) error {
		return g.call(ctx, guestCallWithin, "guest-exec", command, &started)
	}); err != nil {
		return GuestExit{}, timedOut(ctx, err)
	}
	left := int64(maxStatusReplies)
	for wait := firstPoll; ; wait = min(2*wait, lastPoll) {
		if pause(ctx, wait); ctx.Err() != nil {
			return GuestExit{}, context.Cause(ctx)
		}
		// The program runs on while the file systems are frozen.
		exit, ended, err := p.programStatus(ctx, started.PID, &left)
		if ended || err != nil && !errors.Is(err, errFrozen) {
			return exit, timedOut(ctx, p.explainLost(err))
		}
	}
}

// explainLost returns a better error than err for a program whose state cannot be queried because its guest has left this
// process. During a migration, the guest is paused here before it continues at the target.
func (p *Process) explainLost(err error) error {
	switch {
	case err == nil:
		return nil
	case p.life.Err() != nil:
		return errProgramStopped
	case p.Migrating():
		return errProgramMigrated
	}
	return err
}

// timedOut returns the cause of the end of ctx if ctx has ended, and otherwise err.
func timedOut(ctx context.Context, err error) error {
	// The deadline of a connection, which is that of ctx, can pass a moment before ctx ends.
	if deadline, ok := ctx.Deadline(); err != nil && ok && !time.Now().Before(deadline) {
		<-ctx.Done()
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// programStatus queries whether a program that the guest agent has started has ended. It reads at most left bytes of the
// reply, and reduces left by the number of bytes that it has read.
func (p *Process) programStatus(ctx context.Context, pid int64, left *int64) (exit GuestExit, ended bool, err error) {
	var status struct {
		Exited    bool   `json:"exited"`
		Code      int32  `json:"exitcode"`
		Signal    int32  `json:"signal"`
		Output    []byte `json:"out-data"` // in base64
		Errors    []byte `json:"err-data"`
		OutputCut bool   `json:"out-truncated"`
		ErrorsCut bool   `json:"err-truncated"`
	}
	args := struct {
		PID int64 `json:"pid"`
	}{pid}
	err = p.callGuest(ctx, func(ctx context.Context, g *guestConn) error {
		if err := g.send(ctx, guestCallWithin, "guest-exec-status", args); err != nil {
			return err
		}
		g.limit.N = *left
		defer func() { *left = g.limit.N }()
		line, err := readReduced(g.replies, base64Length(maxOutput)+4) // 4 characters more show that there is more
		if err != nil {
			return err
		}
		return decodeReply(line, &status)
	})
	if err != nil || !status.Exited {
		return GuestExit{}, false, err
	}
	exit = GuestExit{Code: status.Code, Signal: status.Signal, OutputCut: status.OutputCut, ErrorsCut: status.ErrorsCut}
	exit.Output, exit.OutputCut = cut(status.Output, status.OutputCut)
	exit.Errors, exit.ErrorsCut = cut(status.Errors, status.ErrorsCut)
	return exit, true, nil
}

// base64Length returns the length of n bytes in base64; n must be a multiple of 3.
func base64Length(n int) int { return n / 3 * 4 }

// cut returns at most maxOutput bytes of data, and whether something is missing.
func cut(data []byte, before bool) ([]byte, bool) {
	if len(data) <= maxOutput {
		return data, before
	}
	return data[:maxOutput], true
}

// readReduced reads a line of JSON in which no string has a line break. It keeps at most most bytes of each string, so
// that it needs little memory for the output of a program. The kept part must not end within an escape sequence: base64
// has none. It returns an error if the reduced line is still longer than four such strings.
func readReduced(r *bufio.Reader, most int) ([]byte, error) {
	var out []byte
	quoted, escaped, length := false, false, 0
	for {
		b, err := r.ReadByte()
		if err != nil {
			return nil, err
		}
		switch {
		case b == '\n':
			return out, nil
		case !quoted:
			quoted, length = b == '"', 0
		case escaped:
			escaped = false
			length++
		case b == '"':
			quoted = false
		default:
			escaped = b == '\\'
			length++
		}
		if quoted && length > most && !mutant.On(mutant.KeepGuestOutput) {
			continue
		}
		if len(out) >= 4*most {
			return nil, io.ErrShortBuffer
		}
		out = append(out, b)
	}
}
