package main

import (
	"testing"

	"github.com/trivet-cloud/trivet/docs/docstest"
)

// TestConfigurationPage checks that docs/configuration.md has a row for each setting, with its flag, environment
// variable and default.
func TestConfigurationPage(t *testing.T) {
	var flags []docstest.Flag[Config]
	for _, s := range configSettings {
		flags = append(flags, docstest.Flag[Config]{Name: s.name, Set: s.set})
	}
	docstest.Configuration(t, "../docs/configuration.md", "trivet-nodeagent", Default, flags)
}
