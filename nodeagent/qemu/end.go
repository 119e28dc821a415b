package qemu

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// sync asks QEMU for its run state. If the guest has ended or cannot go on, sync records the reason.
func (p *Process) sync(conn *qmp.Conn) error {
	var s Status
	if err := conn.Do(p.life, "query-status", nil, &s); err != nil {
		return err
	}
	switch s.State {
	case "shutdown":
		if p.home.asked() != askedNothing {
			p.conclude(asIntended)
		} else {
			p.conclude(Exit{Guest, "the guest powered itself off"})
		}
	case "guest-panicked":
		p.conclude(Exit{Crashed, "the guest's kernel panicked"})
	case "internal-error":
		p.conclude(Exit{Crashed, withStderr("QEMU stopped the guest after an internal error of its accelerator", p.home.stderr())})
	case "io-error":
		return p.findDiskError(conn)
	}
	return nil
}

// conclude records how the guest ended, then ends QEMU. QEMU keeps running after its guest has ended, so that the agent
// can record the reason.
func (p *Process) conclude(e Exit) {
	if p.Exit().Reason != "" {
		return
	}
	if err := p.home.write("exit.json", e); err != nil {
		return // QEMU keeps its state, so the next sync tries again
	}
	p.finish(e)
}

// finish ends a QEMU whose guest has ended. The Exit has been recorded.
func (p *Process) finish(e Exit) {
	p.mu.Lock()
	p.exit = e
	p.mu.Unlock()
	p.notify()
	// In its own goroutine, because the caller reads the events and must see the end of the connection. If the agent stops
	// meanwhile, the next one finds QEMU in the same state.
	p.tasks.Go(func() { _ = p.quit(p.life) })
}

// quit asks QEMU to flush its disks and to end, and kills it if it has not ended in time.
func (p *Process) quit(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, p.patience)
	defer cancel()
	// The answer does not matter: quit waits for the process to end.
	_ = p.do(bounded, p.work, "quit", nil, nil)
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

// killNow kills all processes in QEMU's cgroup and waits for their end.
func (p *Process) killNow(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if err := p.host.Cgroups.Kill(ctx, p.home.id); err != nil {
		return err
	}
	select {
	case <-p.exited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of QEMU: %w", ctx.Err())
	}
}

// noteDisk records the error of a BLOCK_IO_ERROR event, if the error stopped the guest.
func (p *Process) noteDisk(e qmp.Event) {
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

// findDiskError finds the disk whose error stopped the guest while no agent received events.
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

// noise matches what QEMU writes before a message: the time, the name of the program, and an option.
var noise = regexp.MustCompile(`^([0-9T:.-]+Z )?(\S*qemu\S*: )?(-[a-z-]+ (\{.*\}|\S+): )?`)

// withStderr appends the last lines that QEMU wrote to stderr, as printable ASCII.
func withStderr(text string, log *console.Log) string {
	const lines, length = 3, 200
	tail, err := log.Tail(4 << 10)
	if err != nil {
		return text
	}
	all := strings.Split(strings.TrimSpace(string(tail)), "\n")
	var said []string
	for _, l := range all[max(0, len(all)-lines):] {
		if l = strings.TrimSpace(printable(noise.ReplaceAllString(l, ""), length)); l != "" {
			said = append(said, l)
		}
	}
	if len(said) == 0 {
		return text
	}
	return text + ": " + strings.Join(said, "; ")
}

// printable replaces the characters of s that are not printable ASCII by "?", and cuts it to n bytes.
func printable(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
	return s[:min(len(s), n)]
}

// Exits that are recorded in more than one place, or that happened while no agent was running.
var (
	asIntended    = Exit{Asked, "powered off as asked"}
	notStarted    = Exit{Crashed, "QEMU could not be started"}
	hostRestarted = Exit{Crashed, "the host was restarted"}
	lostStart     = Exit{Crashed, "the agent was restarted while QEMU was being started"}
)

// flooded is the Exit of a QEMU that was killed because its logs grew too fast.
var flooded = Exit{Crashed, "the host killed QEMU because it wrote more to its logs than a guest's console can produce: the guest may have taken over QEMU"}

const outOfMemory = "the host killed QEMU because it exceeded its memory limit"

// Cut turns the power off: QEMU flushes its disks and ends; it is killed if that takes more than 5 s. Cut returns when
// QEMU has ended.
func (p *Process) Cut(ctx context.Context) error {
	return p.ending(ctx, "cut power", p.quit)
}

// Kill ends QEMU at once, without a flush. It returns when QEMU has ended.
func (p *Process) Kill(ctx context.Context) error {
	return p.ending(ctx, "kill QEMU", p.killNow)
}

func (p *Process) ending(ctx context.Context, what string, how func(context.Context) error) error {
	select {
	case <-p.exited:
		return nil
	default:
	}
	if err := p.home.ask(askedCut); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if err := how(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// Powerdown presses the guest's power button. The guest decides whether and when to shut down.
func (p *Process) Powerdown(ctx context.Context) error {
	if err := p.home.ask(askedPowerdown); err != nil {
		return fmt.Errorf("press power button: %w", err)
	}
	return p.do(ctx, p.work, "system_powerdown", nil, nil)
}
