// Package settings loads the configuration of a program from a YAML file, environment variables and flags. Load reports
// all errors of the three together, each with the name of its key, variable or flag.
//
// # Decisions
//
//   - A configuration is a struct with yaml tags. Its method BindFlags defines flags that set its fields. An
//     environment variable has the same syntax as the flag, because the flag parses its value.
//   - Load decodes YAML structs itself and leaves values to package yaml. The strict mode of that package names the Go
//     types of a program instead of keys, and gives no path for a value that does not fit. koanf decodes by way of
//     map[string]any, which has no line numbers.
package settings

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

// Config is the configuration of a program. An implementation is a pointer to a struct with yaml tags. When Load is
// called, the struct contains the defaults.
type Config interface {
	// BindFlags adds flags that set fields of the configuration to f.
	BindFlags(f *pflag.FlagSet)
}

// Sources lists the sources from which Load reads settings. Each may be empty or nil.
type Sources struct {
	// File is the path of a YAML file. Load reads none if it is empty.
	File string
	// LookupEnv returns the value of an environment variable, like os.LookupEnv. If it is nil, Load reads no
	// environment variables.
	LookupEnv func(name string) (string, bool)
	// Flags is a parsed flag set. Load ignores flags in it that c.BindFlags does not define. If it is nil, Load reads
	// no flags.
	Flags *pflag.FlagSet
}

// Variable returns the name of the environment variable that sets the same field as a flag. For the flag kv-quota, that
// is TRIVET_KV_QUOTA.
func Variable(flag string) string {
	return "TRIVET_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Load overwrites the fields of c, first with the settings in the file, then with the environment variables, and then
// with the flags that were given. It returns an error for a key that c does not have, a key that occurs twice, and a
// second document in the file. Environment variables that belong to no flag are ignored.
func Load(c Config, s Sources) error {
	var errs []error
	if s.File != "" {
		text, err := os.ReadFile(s.File)
		if err != nil {
			return fmt.Errorf("read configuration: %w", err)
		}
		for _, err := range decode(text, c) {
			errs = append(errs, fmt.Errorf("%s: %w", s.File, err))
		}
	}
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.BindFlags(own)
	if s.LookupEnv != nil {
		own.VisitAll(func(f *pflag.Flag) {
			if value, ok := s.LookupEnv(Variable(f.Name)); ok {
				if err := f.Value.Set(value); err != nil {
					errs = append(errs, fmt.Errorf("%s: %w", Variable(f.Name), err))
				}
			}
		})
	}
	if s.Flags != nil {
		s.Flags.Visit(func(given *pflag.Flag) {
			if f := own.Lookup(given.Name); f != nil {
				if err := copyValue(f.Value, given.Value); err != nil {
					errs = append(errs, fmt.Errorf("--%s: %w", f.Name, err))
				}
			}
		})
	}
	return errors.Join(errs...)
}

// copyValue sets a flag to the value of another flag of the same type. For a list it calls Replace, because Set would
// append to the list.
func copyValue(to, from pflag.Value) error {
	if list, ok := from.(pflag.SliceValue); ok {
		return to.(pflag.SliceValue).Replace(list.GetSlice())
	}
	return to.Set(from.String())
}

// decode stores the settings of a YAML text in c, and returns all errors. The text must have at most one document.
func decode(text []byte, c Config) []error {
	var document, second yaml.Node
	d := yaml.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&document); errors.Is(err, io.EOF) {
		return nil
	} else if err != nil {
		return []error{err}
	}
	if err := d.Decode(&second); !errors.Is(err, io.EOF) {
		return []error{errors.New("more than one document")}
	}
	return decodeDocument(&document, c)
}
