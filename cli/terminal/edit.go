package terminal

import (
	"context"
	"os"
	"os/exec"
)

// Edit opens a file in the editor of the environment variable VISUAL or EDITOR, or else in vi, and waits for its end.
// The value of the variable may have arguments.
func Edit(ctx context.Context, env func(string) string, path string) error {
	editor := "vi"
	for _, name := range []string{"EDITOR", "VISUAL"} {
		if value := env(name); value != "" {
			editor = value
		}
	}
	c := exec.CommandContext(ctx, "sh", "-c", editor+` "$1"`, "sh", path)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	return c.Run()
}
