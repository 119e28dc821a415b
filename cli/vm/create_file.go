package vm

import (
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/flagfile"
	"github.com/trivet-cloud/trivet/cli/session"
)

// createFile describes the file of `trivet vm create -f`.
var createFile = flagfile.File{
	Argument: "name",
	Shapes: map[string]flagfile.Shape{
		"disk": {First: map[string]string{"size": ""}, Keys: []string{"image", "class", "bus", "cache", "id", "boot-index"}},
		"volume": {
			First: map[string]string{"name": ""}, Keys: []string{"bus", "cache", "id", "boot-index"}, Words: []string{"boot"},
		},
		"network": {
			First: map[string]string{"subnet": "", "vpc": "vpc:", "port": "port:"},
			Keys:  []string{"ip", "mac", "group", "model", "id"},
		},
	},
	Aliases: map[string]string{"disks": "disk", "volumes": "volume", "networks": "network", "labels": "label", "ssh-keys": "ssh-key"},
	Pairs:   []string{"label", "metadata"},
}

// applyFile sets the flags of c from the file at path, or from standard input if path is "-". It returns the name of
// the VM in the file, or "". Its errors are *session.Usage errors.
func applyFile(s *session.Session, c *cobra.Command, path string) (name string, err error) {
	var r io.Reader = s.Stdin
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return "", session.Usagef("--file: %v", err)
		}
		defer file.Close()
		r = file
	}
	if name, err = createFile.Apply(c, r); err != nil {
		return "", session.Usagef("--file %s: %v", path, err)
	}
	return name, nil
}
