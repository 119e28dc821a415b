package apply

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
)

// objectLimit is the deadline for each object unless --timeout is given. A host may need minutes to copy an image.
const objectLimit = 10 * time.Minute

// Command returns the command `trivet apply`. kinds are in the order in which objects are applied. defaultKind is the
// name of the kind of documents without the key "kind".
func Command(s *session.Session, defaultKind string, kinds ...*Kind) *cobra.Command {
	var files []string
	run := &Run{planned: map[string]bool{}}
	c := &cobra.Command{
		Use: "apply -f FILE...", Short: "Create and change the objects that files describe", Args: session.Exactly(),
		Long: `Create and change objects, so that they are as YAML files describe them. A file has one or more documents, with a
line --- between them. The key "kind" of a document is
  ` + kindNames(kinds) + `.
Without it, the document is a VM. The other keys are "name" and the flags of the create command of the kind, as for
"trivet vm create -f".

An object that does not exist is created. Of an object that exists, the values that the file gives are changed, and all
others stay. If a value cannot be changed, the command fails for this object and leaves it as it is. Nothing is deleted.
The command prints a line for each object, and goes on after a failure. The exit code is that of the first failure.

These values of an object that exists can be changed:
  vm              processors, memory, instance type, restart policy, recovery, host, labels and metadata; the security
                  groups of a NIC; disks, volumes and NICs that the VM does not have are attached
  volume          the size, if it grows; labels and metadata
  vpc             the description
  subnet          the description, DHCP and DNS servers
  security-group  the description; rules that the group does not have are added

A VM that runs gets new processors and memory at its next start or reboot. An empty value removes a label or a pair of the
metadata. These keys matter only for a new object: start, wait, no-wait, ssh-key and user-data of a VM, image and
snapshot of a volume, egress and external of a VPC.

Objects are applied in this order: ` + strings.Join(firstNames(kinds), ", ") + `.`,
		Example: `  trivet apply -f cloud.yaml --dry-run
  trivet apply -f network.yaml -f vms.yaml
  cat vm.yaml | trivet apply -f -`,
	}
	c.Flags().StringArrayVarP(&files, "file", "f", nil, "YAML file, repeatable; - for standard input")
	c.Flags().BoolVar(&run.Dry, "dry-run", false, "print what would be done, and change nothing")
	_ = c.MarkFlagFilename("file", "yaml", "yml") // its only error is for an unknown flag
	session.Require(c, "file")
	var objects []*object
	body := s.Run(0, func(ctx context.Context, conn *dial.Conn, names []string) error {
		o := &output{s: s, run: run}
		err := s.Each(ctx, objectLimit, names, func(ctx context.Context, name string) error {
			i := slices.IndexFunc(objects, func(o *object) bool { return o.String() == name })
			plan, err := objects[i].apply(ctx, conn, run)
			if err != nil {
				o.add(objects[i], "failed", nil)
				return about(name, err)
			}
			return o.done(objects[i], plan)
		})
		o.addOthers(objects)
		return errors.Join(err, o.end())
	})
	c.RunE = func(c *cobra.Command, _ []string) (err error) {
		if objects, err = read(s, files, defaultKind, kinds); err != nil {
			return err
		}
		names := make([]string, len(objects))
		for i, o := range objects {
			names[i] = o.String()
		}
		return body(c, names)
	}
	return c
}

// object is an object of a file.
type object struct {
	kind, name string
	// order is the place of the kind in the order in which objects are applied.
	order   int
	command *cobra.Command
	plan    PlanFunc
}

// String returns the kind and the name, such as vm/web.
func (o *object) String() string { return o.kind + "/" + o.name }

// apply compares the object with the cloud, and creates or changes it unless the run is dry.
func (o *object) apply(ctx context.Context, conn *dial.Conn, run *Run) (*Plan, error) {
	plan, err := o.plan(ctx, conn, run, o.name)
	if err != nil {
		return nil, err
	}
	if plan.Create && o.command.PreRunE != nil {
		// The flags that are required, and those that cannot be combined.
		if err := o.command.PreRunE(o.command, []string{o.name}); err != nil {
			return nil, err
		}
	}
	if run.Dry {
		run.planned[o.String()] = plan.Create
		return plan, nil
	}
	if plan.Create || len(plan.Changes) > 0 {
		err = plan.Do(ctx)
	}
	return plan, err
}

// about adds the name of an object to the message of an error.
func about(object string, err error) error {
	var usage *session.Usage
	var problem *session.Problem
	switch {
	case errors.As(err, &usage):
		return session.Usagef("%s: %s", object, usage.Message)
	case errors.As(err, &problem):
		with := *problem
		with.Message = object + ": " + problem.Message
		return &with
	}
	return fmt.Errorf("%s: %w", object, err)
}
