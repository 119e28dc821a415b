package main

import (
	"testing"

	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/docs/docstest"
)

// docs/configuration.md has a row for each key, with its flag, environment variable and default.
func TestConfigurationPage(t *testing.T) {
	set := func(c *Config) *pflag.FlagSet {
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		c.flags(f)
		return f
	}
	var flags []docstest.Flag[Config]
	c := Default()
	set(&c).VisitAll(func(f *pflag.Flag) {
		flags = append(flags, docstest.Flag[Config]{Name: f.Name, Set: func(c *Config, text string) error { return set(c).Set(f.Name, text) }})
	})
	docstest.Configuration(t, "../docs/configuration.md", "trivet-controlplane", Default, flags)
}
