package config

import (
	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/shared/settings"
)

// Load returns the configuration. Flags that were set take precedence over environment variables. These take precedence
// over the file, whose path may be empty for no file. Unknown keys in the file are an error. Environment variables that
// start with TRIVET_ but name no setting are ignored, because the trivet command has variables of its own.
func Load(file string, lookupEnv func(name string) (string, bool), flags *pflag.FlagSet) (Config, error) {
	c := Default()
	c.NodeID = 0
	err := settings.Load(&c, settings.Sources{File: file, LookupEnv: lookupEnv, Flags: flags})
	if c.NodeID == 0 && len(c.Join) == 0 {
		c.NodeID = 1
	}
	return c, err
}
