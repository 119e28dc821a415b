package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// ClockEnv returns the environment variable, as NAME=VALUE, that makes a member add to its clock the offset that
// SetClock sets. It has an effect only in a program built with the tag mutant; see Faulty.
func ClockEnv(id int) string { return "TRIVET_CLOCK=" + clockFile(id) }

func clockFile(id int) string { return fmt.Sprintf("clock-%d", id) }

// SetClock sets how far a member's clock is ahead of this host's. A running member adopts it at once, and every later
// start of that member uses it too. The member must have been started with ClockEnv.
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

// Faulty returns b with the path of the control plane that was built with the tag mutant: mutant/trivet-controlplane in
// the directory of b.ControlPlane.
func (b Binaries) Faulty() Binaries {
	b.ControlPlane = Mutant(b.ControlPlane)
	return b
}

// Mutant returns the path of the program that was built with the tag mutant: mutant/NAME in the directory of the program.
func Mutant(program string) string {
	return filepath.Join(filepath.Dir(program), "mutant", filepath.Base(program))
}
