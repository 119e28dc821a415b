package config_test

import (
	"testing"

	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/docs/docstest"
)

// TestConfigurationPage checks that docs/configuration.md has a row for each key, with its flag, environment variable
// and default.
func TestConfigurationPage(t *testing.T) {
	bound := func(c *config.Config) *pflag.FlagSet {
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		c.BindFlags(f)
		return f
	}
	var flags []docstest.Flag[config.Config]
	c := config.Default()
	bound(&c).VisitAll(func(f *pflag.Flag) {
		flags = append(flags, docstest.Flag[config.Config]{
			Name: f.Name, Set: func(c *config.Config, text string) error { return bound(c).Set(f.Name, text) },
		})
	})
	docstest.Configuration(t, "../../docs/configuration.md", "trivet-controlplane", config.Default, flags)
}
