package lab

import (
	"fmt"
	"os"
	"strings"
	"time"
)

// ClockEnv returns the environment variable that makes a member use the clock that SetClock sets. It has an effect only
// in a program built with the tag mutant.
func ClockEnv(id int) string { return "TRIVET_CLOCK=" + clockFile(id) }

func clockFile(id int) string { return fmt.Sprintf("clock-%d", id) }

// SetClock sets a member's clock ahead of this host's, at once and after every restart.
func (t *Trio) SetClock(id int, ahead time.Duration) error {
	path := t.Dir.Path(clockFile(id))
	if err := os.WriteFile(path+".new", []byte(ahead.String()+"\n"), 0o644); err != nil {
		return fmt.Errorf("set the clock of member %d: %w", id, err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("set the clock of member %d: %w", id, err)
	}
	return nil
}

// Faulty returns b with the control plane that was built with the tag mutant, in a directory beside the others.
func (b Binaries) Faulty() Binaries {
	b.ControlPlane = strings.TrimSuffix(b.ControlPlane, "trivet-controlplane") + "mutant/trivet-controlplane"
	return b
}
