package lab

import (
	"fmt"
	"os"
	"strings"
	"time"
)

// ClockEnv is what makes a member take its clock from SetClock, if the program was built with the tag mutant.
func ClockEnv(id int) string { return "TRIVET_CLOCK=" + clockFile(id) }

func clockFile(id int) string { return fmt.Sprintf("clock-%d", id) }

// SetClock puts a member's clock ahead of this host's, at once and also when it is started again.
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

// Faulty is the name of the control plane that was built with the tag mutant, beside the others.
func (b Binaries) Faulty() Binaries {
	b.ControlPlane = strings.TrimSuffix(b.ControlPlane, "trivet-controlplane") + "mutant/trivet-controlplane"
	return b
}
