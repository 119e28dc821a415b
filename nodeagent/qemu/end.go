package qemu

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/digitalocean/go-qemu/qmp/raw"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// handleRunState queries QEMU's run state. If the guest has ended, it records the exit and ends QEMU. If a disk error
// has paused the guest, it sets the error that LastError returns.
func (p *Process) handleRunState(conn *qmp.Conn) error {
	info, err := raw.NewMonitor(conn.With(p.life)).QueryStatus()
	if err != nil {
		return err
	}
	switch info.Status {
	case raw.RunStateShutdown:
		if p.home.requested() != requestedNothing {
			p.recordExitAndQuit(exitRequested)
		} else {
			p.recordExitAndQuit(Exit{Guest, "the guest powered itself off"})
		}
	case raw.RunStateGuestPanicked:
		p.recordExitAndQuit(Exit{Crashed, "the guest's kernel panicked"})
	case raw.RunStateInternalError:
		p.recordExitAndQuit(Exit{Crashed, withStderr("QEMU stopped the guest after an internal error of its accelerator", p.home.stderr())})
	case raw.RunStateIOError:
		return p.findDiskError(conn)
	}
	return nil
}

// recordExitAndQuit records how the guest ended, then ends QEMU. It does nothing if an exit is recorded already.
func (p *Process) recordExitAndQuit(e Exit) {
	if p.Exit().Reason != "" {
		return
	}
	if err := p.home.write("exit.json", e); err != nil {
		return // QEMU stays in this run state, and the next call tries again.
	}
	p.setExitAndQuit(e)
}

// setExitAndQuit sets the exit of the process to e, which is recorded on disk already, and ends QEMU.
func (p *Process) setExitAndQuit(e Exit) {
	p.mu.Lock()
	p.exit = e
	p.mu.Unlock()
	p.notify()
	// quit runs in its own goroutine, so that followEvents continues and notices the end of the connection. If the
	// agent ends before QEMU, the next agent finds QEMU in the same run state.
	p.tasks.Go(func() { _ = p.quit(p.life) })
}

// quit sends the QMP command quit, on which QEMU flushes its disks and ends. If QEMU has not ended after quitWithin,
// quit kills it.
func (p *Process) quit(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, p.quitWithin)
	defer cancel()
	// The result of the command is ignored: only the end of the process matters.
	_ = p.do(bounded, p.work, (*raw.Monitor).Quit)
	select {
	case <-p.exited:
		return nil
	case <-bounded.Done():
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return p.killNow(ctx)
}

// killNow kills all processes of the VM's control group and waits until QEMU has ended.
func (p *Process) killNow(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if err := p.launcher.Cgroups.Kill(ctx, p.home.id); err != nil {
		return err
	}
	select {
	case <-p.exited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of QEMU: %w", ctx.Err())
	}
}

// recordDiskError decodes a BLOCK_IO_ERROR event. If the disk error has paused the guest, recordDiskError makes it the
// result of LastError.
func (p *Process) recordDiskError(e qmp.Event) {
	var data struct {
		Node      string `json:"node-name"`
		Operation string `json:"operation"`
		Action    string `json:"action"`
		Reason    string `json:"reason"`
	}
	if err := e.Decode(&data); err != nil || data.Action != "stop" {
		return
	}
	p.setDiskError(data.Node, fmt.Sprintf("%s error: %s", data.Operation, printable(data.Reason, 200)))
}

// findDiskError sets the result of LastError from the states of the disks, in case the event of the error was missed.
// It does not use go-qemu's QueryBlock: see package qmp. With an RBD image, QEMU is not queried, because QEMU reads
// from the image to answer (see Disks). LastError then has a text without the disk and the cause.
func (p *Process) findDiskError(conn *qmp.Conn) error {
	if p.LastError() != "" {
		return nil
	}
	if hasRBD(p.Record().Spec.Disks) {
		p.mu.Lock()
		p.lastError = "a disk had an error; the guest is stopped"
		p.mu.Unlock()
		p.notify()
		return nil
	}
	var blocks []struct {
		Status   string `json:"io-status"`
		Inserted struct {
			Node string `json:"node-name"`
		} `json:"inserted"`
	}
	if err := conn.Do(p.life, "query-block", nil, &blocks); err != nil {
		return err
	}
	for _, b := range blocks {
		switch b.Status {
		case "nospace":
			p.setDiskError(b.Inserted.Node, "write error: No space left on device")
		case "failed":
			p.setDiskError(b.Inserted.Node, "input/output error")
		}
	}
	return nil
}

// setDiskError sets the result of LastError to an error of one disk. The parameter node is the name of the disk's block
// node.
func (p *Process) setDiskError(node, text string) {
	name := node
	for _, d := range p.Record().Spec.Disks {
		if d.node() == node {
			name = d.ID
		}
	}
	p.mu.Lock()
	p.lastError = fmt.Sprintf("disk %s: %s; the guest is stopped", name, text)
	p.mu.Unlock()
	p.notify()
}

// stderrPrefix matches the beginning of a line of QEMU's standard error, before the message: time, program and option.
var stderrPrefix = regexp.MustCompile(`^([0-9T:.-]+Z )?(\S*qemu\S*: )?(-[a-z-]+ (\{.*\}|\S+): )?`)

// withStderr appends the last lines of QEMU's standard error to text, as printable ASCII.
func withStderr(text string, log *console.Log) string {
	const lines, length = 3, 200
	tail, err := log.Tail(4 << 10)
	if err != nil {
		return text
	}
	all := strings.Split(strings.TrimSpace(string(tail)), "\n")
	var texts []string
	for _, l := range all[max(0, len(all)-lines):] {
		if l = strings.TrimSpace(printable(stderrPrefix.ReplaceAllString(l, ""), length)); l != "" {
			texts = append(texts, l)
		}
	}
	if len(texts) == 0 {
		return text
	}
	return text + ": " + strings.Join(texts, "; ")
}

// printable returns at most n bytes of s, with '?' for each character that is not printable ASCII.
func printable(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
	return s[:min(len(s), n)]
}

// Exits with a fixed text. Adopt, Launch and Process record them.
var (
	exitRequested     = Exit{Requested, "powered off as requested"}
	exitNotStarted    = Exit{Crashed, "QEMU could not be started"}
	exitHostRestarted = Exit{Crashed, "the host was restarted"}
	exitLaunchLost    = Exit{Crashed, "the agent was restarted while QEMU was being started"}
)

// exitFlooded is recorded for a QEMU that was killed because its logs grew too fast.
var exitFlooded = Exit{Crashed, "QEMU wrote more to its logs than a guest's console can, and was killed: an attacker may have escaped from the guest"}

const outOfMemory = "the host killed QEMU because it exceeded its memory limit"

// PowerOff ends QEMU, which flushes its disks first. If QEMU has not ended after 5 s, PowerOff kills it. It returns
// when the process has ended.
func (p *Process) PowerOff(ctx context.Context) error {
	return p.endBy(ctx, "power off", p.quit)
}

// Kill kills QEMU without a flush. It returns when the process has ended.
func (p *Process) Kill(ctx context.Context) error {
	return p.endBy(ctx, "kill QEMU", p.killNow)
}

// EndInFailure records that the guest has failed for the reason text, and kills QEMU without a flush. It returns when the
// process has ended. If an exit is recorded already, that one remains. After an error, QEMU may still run.
func (p *Process) EndInFailure(ctx context.Context, text string) error {
	if err := p.recordFailure(text); err != nil {
		return fmt.Errorf("end QEMU: %w", err)
	}
	if err := p.killNow(ctx); err != nil {
		return fmt.Errorf("end QEMU: %w", err)
	}
	return nil
}

func (p *Process) recordFailure(text string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exit.Reason != "" {
		return nil
	}
	e := Exit{Crashed, text}
	if err := p.home.write("exit.json", e); err != nil {
		return err
	}
	p.exit = e
	return nil
}

// endBy ends the process by calling the function how. Before that it stores that the end was requested, so that the
// recorded exit is exitRequested. If the process has ended already, endBy does nothing. The parameter what is the
// beginning of the error text.
func (p *Process) endBy(ctx context.Context, what string, how func(context.Context) error) error {
	select {
	case <-p.exited:
		return nil
	default:
	}
	if err := p.home.setRequested(requestedPowerOff); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if err := how(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// PressPowerButton presses the guest's power button. The guest may shut down, later or not at all.
func (p *Process) PressPowerButton(ctx context.Context) error {
	if err := p.home.setRequested(requestedPowerButton); err != nil {
		return fmt.Errorf("press power button: %w", err)
	}
	return p.do(ctx, p.work, (*raw.Monitor).SystemPowerdown)
}
