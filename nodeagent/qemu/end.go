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

// handleRunState asks QEMU for its state, and acts on one that a guest does not come back from.
func (p *Process) handleRunState(conn *qmp.Conn) error {
	info, err := raw.NewMonitor(conn.With(p.life)).QueryStatus()
	if err != nil {
		return err
	}
	switch info.Status {
	case raw.RunStateShutdown:
		if p.home.asked() != askedNothing {
			p.recordExitAndQuit(exitAsked)
		} else {
			p.recordExitAndQuit(Exit{Guest, "the guest powered itself off"})
		}
	case raw.RunStateGuestPanicked:
		p.recordExitAndQuit(Exit{Crashed, "the guest's kernel panicked"})
	case raw.RunStateInternalError:
		p.recordExitAndQuit(Exit{Crashed, withStderr("the guest did something that its accelerator cannot do", p.home.stderr())})
	case raw.RunStateIOError:
		return p.findDiskError(conn)
	}
	return nil
}

// recordExitAndQuit writes down how the guest ended, then ends QEMU, which waited for that.
func (p *Process) recordExitAndQuit(e Exit) {
	if p.Exit().Reason != "" {
		return
	}
	if err := p.home.write("exit.json", e); err != nil {
		return // QEMU keeps the state until somebody can write it down
	}
	p.setExitAndQuit(e)
}

// setExitAndQuit ends a QEMU whose guest has ended, as is written down.
func (p *Process) setExitAndQuit(e Exit) {
	p.mu.Lock()
	p.exit = e
	p.mu.Unlock()
	p.notify()
	// By a task of its own: the reader of events goes on, and sees the connection end. Should the agent let go meanwhile,
	// the next one finds the same state.
	p.tasks.Go(func() { _ = p.quit(p.life) })
}

// quit ends QEMU, flushing its disks, by force if it must.
func (p *Process) quit(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, p.quitWithin)
	defer cancel()
	// What it answers does not matter, only that it goes.
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

// recordDiskError keeps an error of a disk that stopped the guest.
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

// findDiskError names the disk that stopped a guest while nobody listened.
func (p *Process) findDiskError(conn *qmp.Conn) error {
	if p.LastError() != "" {
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

func (p *Process) setDiskError(node, text string) {
	name := node
	for _, d := range p.record.Spec.Disks {
		if d.node() == node {
			name = d.ID
		}
	}
	p.mu.Lock()
	p.lastError = fmt.Sprintf("disk %s: %s; the guest is stopped", name, text)
	p.mu.Unlock()
	p.notify()
}

// stderrPrefix is what stands before the message in a line of QEMU's: time, program, and the option that it is about.
var stderrPrefix = regexp.MustCompile(`^([0-9T:.-]+Z )?(\S*qemu\S*: )?(-[a-z-]+ (\{.*\}|\S+): )?`)

// withStderr adds the last lines that QEMU said, made harmless.
func withStderr(text string, log *console.Log) string {
	const lines, length = 3, 200
	tail, err := log.Tail(4 << 10)
	if err != nil {
		return text
	}
	all := strings.Split(strings.TrimSpace(string(tail)), "\n")
	var said []string
	for _, l := range all[max(0, len(all)-lines):] {
		if l = strings.TrimSpace(printable(stderrPrefix.ReplaceAllString(l, ""), length)); l != "" {
			said = append(said, l)
		}
	}
	if len(said) == 0 {
		return text
	}
	return text + ": " + strings.Join(said, "; ")
}

// printable cuts s to n bytes of ASCII that a terminal takes.
func printable(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
	return s[:min(len(s), n)]
}

// Ends that are concluded in more than one place, or that nobody could watch.
var (
	exitAsked         = Exit{Asked, "powered off as asked"}
	exitNotStarted    = Exit{Crashed, "QEMU could not be started"}
	exitHostRestarted = Exit{Crashed, "the host was restarted"}
	exitLaunchLost    = Exit{Crashed, "the agent was restarted while QEMU was being started"}
)

// exitFlooded is the Exit of a QEMU that was killed because its logs grew too fast.
var exitFlooded = Exit{Crashed, "QEMU wrote more to its logs than a guest's console can, and was ended by the host: somebody may have broken out of the guest"}

const outOfMemory = "QEMU exceeded its memory limit and was ended by the host"

// PowerOff turns the power off: QEMU flushes its disks and ends, by force after 5 s. It returns when QEMU is gone.
func (p *Process) PowerOff(ctx context.Context) error {
	return p.endBy(ctx, "power off", p.quit)
}

// Kill ends QEMU at once, without a flush. It returns when QEMU is gone.
func (p *Process) Kill(ctx context.Context) error {
	return p.endBy(ctx, "kill QEMU", p.killNow)
}

func (p *Process) endBy(ctx context.Context, what string, how func(context.Context) error) error {
	select {
	case <-p.exited:
		return nil
	default:
	}
	if err := p.home.setAsked(askedPowerOff); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if err := how(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// PressPowerButton presses the guest's power button. The guest decides what that means, and when.
func (p *Process) PressPowerButton(ctx context.Context) error {
	if err := p.home.setAsked(askedPowerButton); err != nil {
		return fmt.Errorf("press power button: %w", err)
	}
	return p.do(ctx, p.work, (*raw.Monitor).SystemPowerdown)
}
