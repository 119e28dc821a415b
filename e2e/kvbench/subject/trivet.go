package subject

import (
	"os"
	"strconv"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// Trivet returns three Trivet members that run the programs in the directory bin, with their files beneath dir. extra
// holds additional flags for every member. It starts no member.
func Trivet(dir, bin string, extra ...string) (*Trio, error) {
	trio := lab.NewTrio(lab.Dir(dir), lab.In(bin))
	trio.Extra = append([]string{"--kv-quota", strconv.Itoa(quota)}, extra...)
	if err := trio.Prepare(); err != nil {
		return nil, err
	}
	// The members run under an unprivileged uid, which must be able to open files beneath dir.
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	return &Trio{dir: trio.Dir, port: 50051, name: trio.Name, run: trio.Start}, nil
}
