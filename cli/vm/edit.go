package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// editable is the part of a VM that `trivet vm edit` shows in the editor: what `trivet vm update` can change.
type editable struct {
	VCPUs     uint32            `yaml:"vcpus"`
	MemoryMiB uint64            `yaml:"memory_mib"`
	Labels    map[string]string `yaml:"labels"`
	Metadata  map[string]string `yaml:"metadata"`
}

func editCommand(s *session.Session) *cobra.Command {
	c := vmArgCommand(s, "edit VM", "Change a VM in an editor")
	c.Long = `Change the processors, the memory, the labels and the metadata of a VM as YAML in the editor of VISUAL or EDITOR, or else
in vi. A label or a pair of the metadata that is removed from the text is removed from the VM. A number that is removed
stays as it is. Without a change, nothing
is sent. "trivet vm update" makes the same changes without an editor. ` + sizeHelp
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if s.Edit == nil {
			return session.Usagef("vm edit needs a terminal: use `trivet vm update`")
		}
		call, cancel := s.Limit(ctx, callTimeout)
		vm, t, err := readVM(call, s, conn, args[0])
		cancel()
		if err != nil {
			return err
		}
		before := editableOf(vm)
		path, after, err := before.edit(ctx, s, vm.GetName())
		if err != nil {
			return err
		}
		to := before.change(after)
		if to.empty() {
			s.Note("nothing was changed")
			return os.Remove(path)
		}
		call, cancel = s.Limit(ctx, callTimeout)
		defer cancel()
		if err := to.apply(call, s, conn, t.id); err != nil {
			s.Note("your text is in %s", path)
			return err
		}
		return os.Remove(path)
	})
	return c
}

func editableOf(vm *vmv1.VirtualMachine) *editable {
	e := &editable{VCPUs: vm.GetSpec().GetCpu().GetVcpus(), MemoryMiB: vm.GetSpec().GetMemory().GetSizeMib(),
		Labels: vm.GetLabels(), Metadata: map[string]string{}}
	for k, v := range vm.GetMetadata() {
		if k != cloud.PendingResize {
			e.Metadata[k] = v
		}
	}
	return e
}

// edit shows e in the editor and returns the file with the text that the user has saved, and its values. The caller must
// remove the file. If the text is invalid, edit keeps the file and notes its path.
func (e *editable) edit(ctx context.Context, s *session.Session, name string) (path string, after *editable, err error) {
	text, err := yaml.Marshal(e)
	if err != nil {
		return "", nil, fmt.Errorf("write the text: %w", err)
	}
	f, err := os.CreateTemp("", "trivet-"+name+"-*.yaml")
	if err != nil {
		return "", nil, fmt.Errorf("write the text: %w", err)
	}
	head := fmt.Sprintf("# The VM %s. Lines that begin with # are ignored.\n", name)
	_, err = f.WriteString(head + string(text))
	if err = errors.Join(err, f.Close()); err != nil {
		return "", nil, fmt.Errorf("write the text: %w", err)
	}
	if err := s.Edit(ctx, f.Name()); err != nil {
		return "", nil, errors.Join(fmt.Errorf("run the editor: %w", err), os.Remove(f.Name()))
	}
	if text, err = os.ReadFile(f.Name()); err != nil {
		return "", nil, fmt.Errorf("read the text: %w", err)
	}
	after = &editable{VCPUs: e.VCPUs, MemoryMiB: e.MemoryMiB} // a number that is not in the text is not changed
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	switch err := d.Decode(after); {
	case errors.Is(err, io.EOF):
		return f.Name(), e, nil // an empty text changes nothing, as in other programs with editors
	case err != nil:
		s.Note("your text is in %s", f.Name())
		return "", nil, session.Usagef("the text is not valid: %s", invalidYAML(err))
	case after.VCPUs == 0 && e.VCPUs > 0, after.MemoryMiB == 0 && e.MemoryMiB > 0:
		s.Note("your text is in %s", f.Name())
		return "", nil, session.Usagef("the text is not valid: vcpus and memory_mib must be at least 1")
	}
	return f.Name(), after, nil
}

// invalidYAML returns an error of the YAML decoder as one line, without the names of Go types.
func invalidYAML(err error) string {
	var types *yaml.TypeError
	if !errors.As(err, &types) {
		return strings.TrimPrefix(err.Error(), "yaml: ")
	}
	lines := make([]string, len(types.Errors))
	for i, line := range types.Errors {
		lines[i] = strings.ReplaceAll(line, "not found in type vm.editable", "is unknown; want vcpus, memory_mib, labels or metadata")
	}
	return strings.Join(lines, "; ")
}

// change returns what an update must change, so that a VM with the values of e has those of after.
func (e *editable) change(after *editable) *change {
	c := &change{labels: pairsChange(e.Labels, after.Labels), metadata: pairsChange(e.Metadata, after.Metadata)}
	if after.VCPUs != e.VCPUs {
		c.vcpus = after.VCPUs
	}
	if after.MemoryMiB != e.MemoryMiB {
		c.memoryMiB = after.MemoryMiB
	}
	return c
}

// pairsChange returns the pairs of after that differ from before, and the keys that after lacks with an empty value,
// which removes them.
func pairsChange(before, after map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range after {
		if was, ok := before[k]; !ok || was != v {
			out[k] = v
		}
	}
	for k := range before {
		if _, ok := after[k]; !ok {
			out[k] = ""
		}
	}
	return out
}

func (x *change) empty() bool {
	return len(x.labels) == 0 && len(x.metadata) == 0 && len(x.diskSizes) == 0 && !x.resizes()
}
