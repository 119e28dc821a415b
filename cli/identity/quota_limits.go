package identity

import (
	"github.com/spf13/pflag"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// The values of a limit's flag that remove the limit: unlimited, or byDefault if the default is a limit.
const (
	unlimited = "unlimited"
	byDefault = "default"
)

// quotaFlags holds the command-line flags for the limits of a quota, one for each resource in the field named of.
type quotaFlags struct {
	flags *pflag.FlagSet
	of    []quotaResource
}

// Add adds flags to a command: one for each resource that the quota of a project limits.
func (l *quotaFlags) Add(to *pflag.FlagSet) { l.add(to, projectQuota) }

func (l *quotaFlags) add(to *pflag.FlagSet, of []quotaResource) {
	l.flags, l.of = to, of
	for _, r := range of {
		to.String(r.name, "", "limit of "+r.usage+"; or "+r.absent())
	}
}

// Names returns the names of the flags.
func (l *quotaFlags) Names() []string {
	names := make([]string, len(l.of))
	for i, r := range l.of {
		names[i] = r.name
	}
	return names
}

// Given reports whether at least one of the flags is on the command line.
func (l *quotaFlags) Given() bool {
	for _, r := range l.of {
		if l.flags.Changed(r.name) {
			return true
		}
	}
	return false
}

// Change sets those limits of q whose flags are on the command line. It returns an error for an invalid value.
func (l *quotaFlags) Change(q *identityv1.Quota) error {
	for _, r := range l.of {
		f := l.flags.Lookup(r.name)
		if !f.Changed {
			continue
		}
		n, err := r.read(f.Value.String())
		if err != nil {
			return err
		}
		*r.limit(q) = n
	}
	return nil
}
