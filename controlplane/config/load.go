package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// Load returns the configuration from a file, from environment variables of the form NAME=value, and from the flags that
// were set, in ascending precedence. file may be empty. Unknown keys in the file are an error; environment variables that
// start with TRIVET_ and name no setting are ignored, because the trivet command has its own. The flag import-dir is not
// read: the caller takes it from the Config that it bound to the flags.
func Load(file string, environ []string, flags *pflag.FlagSet) (Config, error) {
	c := Default()
	c.NodeID = 0
	if file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return c, fmt.Errorf("read configuration: %w", err)
		}
		d := yaml.NewDecoder(bytes.NewReader(text))
		d.KnownFields(true)
		if err := d.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
			return c, fmt.Errorf("%s: %w", file, err)
		}
	}
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.BindFlags(own)
	for _, pair := range environ {
		name, value, _ := strings.Cut(pair, "=")
		name, ours := strings.CutPrefix(name, "TRIVET_")
		if !ours {
			continue
		}
		if f := own.Lookup(strings.ToLower(strings.ReplaceAll(name, "_", "-"))); f != nil {
			if err := f.Value.Set(value); err != nil {
				return c, fmt.Errorf("TRIVET_%s: %w", name, err)
			}
		}
	}
	var errs []error
	flags.Visit(func(f *pflag.Flag) {
		if own.Lookup(f.Name) == nil {
			return
		}
		if f.Name == "import-dir" {
			return // its value has no text form
		}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			errs = append(errs, own.Lookup(f.Name).Value.(pflag.SliceValue).Replace(list.GetSlice()))
			return
		}
		errs = append(errs, own.Set(f.Name, f.Value.String()))
	})
	if c.NodeID == 0 && len(c.Join) == 0 {
		c.NodeID = 1
	}
	return c, errors.Join(errs...)
}
