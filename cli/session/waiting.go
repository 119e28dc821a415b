package session

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/metadata"
)

// Waiting holds the flags --wait and --no-wait of a command whose operation the control plane and the hosts carry out
// after they have recorded it, such as the start of a VM. With --wait the command returns when the operation is complete,
// with --no-wait when it is recorded. All such commands have both flags, so that a script can state what it needs
// without knowing the default of each command. The zero value is for a command without these flags, which waits.
type Waiting struct {
	flags     *pflag.FlagSet
	byDefault bool
}

// Add adds the flags to c. byDefault is what the command does without them: true if it waits.
func (w *Waiting) Add(c *cobra.Command, byDefault bool) {
	w.flags, w.byDefault = c.Flags(), byDefault
	wait, noWait := "wait until the operation is complete, or until --timeout has passed", "return when the operation is recorded, before it is complete"
	if byDefault {
		wait += " (default)"
	} else {
		noWait += " (default)"
	}
	w.flags.Bool("wait", false, wait)
	w.flags.Bool("no-wait", false, noWait)
	Exclusive(c, "wait", "no-wait")
}

// On reports whether the command waits until the operation is complete.
func (w *Waiting) On() bool {
	if w.flags == nil {
		return true
	}
	given := func(name string) (value, ok bool) {
		value, _ = w.flags.GetBool(name) // its only error is for an unknown flag
		return value, w.flags.Changed(name)
	}
	if noWait, ok := given("no-wait"); ok {
		return !noWait
	}
	if wait, ok := given("wait"); ok {
		return wait
	}
	return w.byDefault
}

// Context returns the context for a call in which the control plane waits for a host. If the command does not wait, the
// control plane is asked to respond as soon as the change is recorded (RFC 7240). An older control plane waits all the
// same.
func (w *Waiting) Context(ctx context.Context) context.Context {
	if w.On() {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "prefer", "respond-async")
}
