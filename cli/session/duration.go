package session

import (
	"errors"
	"time"

	"github.com/prometheus/common/model"
	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/cli/explain"
)

// ParseDuration parses a duration with units such as s, m, h and d, for example 1h30m or 7d. A day has 24 hours.
func ParseDuration(text string) (time.Duration, error) {
	if d, err := time.ParseDuration(text); err == nil {
		return d, nil
	}
	d, err := model.ParseDuration(text)
	if err != nil {
		return 0, errors.New("want a duration such as 90s, 5m, 2h or 7d")
	}
	return time.Duration(d), nil
}

// duration is the value of a flag for a duration above 0. pflag's own value has no unit for days.
type duration struct{ pflag.Value }

func (d duration) Set(text string) error {
	n, err := ParseDuration(text)
	if err != nil {
		return err
	}
	if n <= 0 {
		return errors.New("want more than 0")
	}
	return d.Value.Set(n.String())
}

// Seconds is the value of a flag for a number of seconds: a whole number, or a duration of whole seconds with a unit.
type Seconds uint32

// String returns the number of seconds as a duration.
func (n *Seconds) String() string { return explain.Duration(time.Duration(*n) * time.Second) }

// Type returns the name of the type for the help.
func (n *Seconds) Type() string { return "duration in seconds" }

// Set parses the value of the flag.
func (n *Seconds) Set(text string) error {
	d, err := ParseSeconds(text)
	*n = Seconds(d)
	return err
}

// ParseSeconds parses a number of seconds, at least 1: a whole number, or a duration of whole seconds with a unit.
func ParseSeconds(text string) (int64, error) {
	d, err := ParseDuration(text)
	if err != nil {
		d, err = ParseDuration(text + "s")
	}
	if err != nil || d < time.Second || d%time.Second != 0 || d/time.Second > 1<<31 {
		return 0, errors.New("want a number of seconds, or a duration such as 90s, 5m or 2h")
	}
	return int64(d / time.Second), nil
}
