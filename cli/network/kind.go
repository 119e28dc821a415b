package network

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// object is a resource in a response of the service. Most kinds also implement identified, owned and stated.
type object interface {
	proto.Message
	GetName() string
	GetDescription() string
	GetCreatedAt() int64
	GetUpdatedAt() int64
}

type identified interface{ GetId() string }

type owned interface {
	GetOrgId() string
	GetProjectId() string
}

type stated interface {
	GetStatus() networkv1.Status
	GetStatusReason() string
}

// query selects a page of objects of a list RPC. Empty fields select nothing in particular; the other fields are IDs,
// except for name, and for token and size, which are those of the page.
type query struct {
	org, project, name, token        string
	vpc, subnet, device, group, port string
	size                             int32
}

// kind describes a kind of resource: how its objects are read, printed and deleted. It implements the commands that all
// kinds have. The fields more, about, named and address are optional.
type kind[T object] struct {
	// command is the subcommand of `trivet network`, noun names the kind in messages, and arg in usage lines.
	command, noun, arg string
	header             []string
	// wide names the columns of header that are shown only in -o wide. wideInAll names those that are shown only in -o
	// wide in a list over all projects, which has the tenants too. A table then fits into 80 columns.
	wide, wideInAll []string
	// max has the widths to which -o table cuts cells of columns, by the names of the columns. The default is maxCell.
	max map[string]int
	// named is true if objects have a name but no ID.
	named bool
	// everywhere reads a page of the objects of all projects. It is nil if the API has no such list.
	everywhere func(context.Context, networkv1.NetworkServiceClient, query) (objects []T, next string, err error)
	// one is true for the table of one object that was created or changed, which has the whole ID of an object without a
	// name.
	one bool
	// inAll is true for a list over all projects.
	inAll bool
	// address returns the address of an object, by which it can be looked up as by its name.
	address func(T) string
	// row returns the cells of an object, one for each string in header.
	row func(T, *labels) []string
	// fields returns the lines of `show` that only this kind has.
	fields func(T, *labels) [][2]string
	// more prints the lists of an object, as tables below the lines of `show`.
	more func(io.Writer, T, *labels) error
	// about distinguishes an object from others with the same name.
	about  func(T) string
	page   func(context.Context, networkv1.NetworkServiceClient, query) (objects []T, next string, err error)
	get    func(ctx context.Context, t *target, id string) (T, error)
	remove func(ctx context.Context, t *target, id string) error
}

// finder is implemented by every kind: it looks up an object by name or ID.
type finder interface {
	find(ctx context.Context, t *target, nameOrID string) (id string, err error)
	complete(s *session.Session) cobra.CompletionFunc
}

// idOf returns the ID of an object, or its name if the kind has no IDs.
func idOf(o object) string {
	if i, ok := o.(identified); ok {
		return i.GetId()
	}
	return o.GetName()
}

// nameOf returns the name of an object, or its ID if it has no name.
func nameOf(o object) string { return cmp.Or(o.GetName(), idOf(o)) }

// find returns the ID of the object with a name or ID. It returns an error if no object or several objects have the
// name, and a *session.Usage error if the name is invalid. It makes no call for an ID.
func (k *kind[T]) find(ctx context.Context, t *target, nameOrID string) (string, error) {
	return k.findIn(ctx, t, t.query(), nameOrID)
}

// findIn is like find, for the objects that q selects.
func (k *kind[T]) findIn(ctx context.Context, t *target, q query, nameOrID string) (string, error) {
	if session.IsID(nameOrID) && !k.named {
		return nameOrID, nil
	}
	byAddress := k.address != nil && isAddress(nameOrID)
	switch valid := cloud.CheckName("", nameOrID) == nil; {
	case k.named && !valid:
		return "", session.Usagef("%q is not a valid name of an %s", nameOrID, k.noun)
	case k.named:
		return nameOrID, nil
	case !valid && !byAddress && k.address != nil:
		return "", session.Usagef("%q is not a valid name, address or ID of a %s", nameOrID, k.noun)
	case !valid && !byAddress:
		return "", session.Usagef("%q is not a valid name or ID of a %s", nameOrID, k.noun)
	}
	matches, err := k.matches(ctx, t, q, nameOrID)
	if err != nil {
		return "", err
	}
	return session.One("network "+k.command, t.s.Scope(), nameOrID, matches)
}

// matches returns the objects with a name, or with an address if the kind has them, among those that q selects.
func (k *kind[T]) matches(ctx context.Context, t *target, q query, name string) ([]session.Match, error) {
	byAddress := k.address != nil && isAddress(name)
	if !byAddress {
		q.name = name
	}
	all, err := k.all(ctx, t, q)
	if byAddress {
		all = slices.DeleteFunc(all, func(o T) bool { return k.address(o) != name })
	}
	matches := make([]session.Match, len(all))
	for i, o := range all {
		matches[i] = session.Match{ID: idOf(o)}
		if k.about != nil {
			matches[i].About = k.about(o)
		}
	}
	return matches, err
}

// all returns all objects that q selects.
func (k *kind[T]) all(ctx context.Context, t *target, q query) ([]T, error) {
	return k.listed(q).All(ctx, t.conn)
}

// listed describes the objects that q selects for lists.
func (k *kind[T]) listed(q query) *list.Kind[T] {
	return &list.Kind[T]{
		Page: func(ctx context.Context, conn *dial.Conn, page list.Query) ([]T, string, error) {
			q.token, q.size = page.Token, page.Size
			return k.page(ctx, networkv1.NewNetworkServiceClient(conn), q)
		},
		Name:    func(o T) string { return nameOf(o) },
		Columns: k.columns,
	}
}

// columns returns the columns of the kind's header, and further ones for -o wide.
func (k *kind[T]) columns(ctx context.Context, s *session.Session, conn *dial.Conn) []list.Column[T] {
	l := newTarget(s, conn).labels(ctx)
	if k.inAll {
		l = newTarget(s, conn).labelsInAll(ctx)
	}
	var all []list.Column[T]
	for i, name := range k.header {
		c := list.Column[T]{Name: name, Text: func(o T) string { return k.row(o, l)[i] }, Max: maxCell}
		switch width, ok := k.max[name]; {
		case name == "NAME": // a name is not cut
			c.Max = 0
			if !k.one {
				c.Table = func(o T) string { return cmp.Or(o.GetName(), show.Shorten(idOf(o), maxID)) }
			}
		case ok:
			c.Max = width
		}
		if slices.Contains(k.wide, name) {
			c.In = list.InWide
		}
		all = append(all, c)
	}
	if !k.named {
		all = append(all, list.Column[T]{Name: "ID", Text: func(o T) string { return idOf(o) }, In: list.InWide})
	}
	if !slices.Contains(k.header, "DESCRIPTION") {
		all = append(all, list.Column[T]{Name: "DESCRIPTION", Text: T.GetDescription, In: list.InWide})
	}
	return append(all, list.Time("CREATED", T.GetCreatedAt, list.InWide))
}

const (
	// maxCell is the width to which -o table cuts cells.
	maxCell = 30
	// maxID is the width to which -o table cuts the ID of an object without a name.
	maxID = 14
	// maxTenant is the width to which -o table cuts the tenant of an object.
	maxTenant = 23
)

// nameByID returns the name of the object with an ID, or the ID if it has no name.
func (k *kind[T]) nameByID(ctx context.Context, t *target, id string) (string, error) {
	o, err := k.get(ctx, t, id)
	if err != nil {
		return "", err
	}
	return nameOf(o), nil
}

// names returns the names of the project's objects, by ID.
func (k *kind[T]) names(ctx context.Context, t *target) (map[string]string, error) {
	all, err := k.all(ctx, t, t.query())
	names := map[string]string{}
	for _, o := range all {
		names[idOf(o)] = nameOf(o)
	}
	return names, err
}

// namesInAll returns the names of the objects of all projects, by ID. It returns nil if the API has no such list.
func (k *kind[T]) namesInAll(ctx context.Context, t *target) (map[string]string, error) {
	if k.everywhere == nil {
		return nil, nil
	}
	return k.inAllProjects().names(ctx, t)
}

// complete returns a shell completion with the names of the first objects.
func (k *kind[T]) complete(s *session.Session) cobra.CompletionFunc {
	return s.Names(func(ctx context.Context, conn *dial.Conn) ([]string, error) {
		return k.listed(newTarget(s, conn).query()).FirstNames(ctx, conn)
	})
}

// printMade prints the object that a call has created or changed, unless the call failed.
func (k *kind[T]) printMade(ctx context.Context, t *target, o T, err error) error {
	if err != nil {
		return err
	}
	one := *k
	one.one = true
	return one.listed(query{}).PrintOne(ctx, t.s, t.conn, o)
}

// filter is a flag of `list` that selects the objects that refer to another resource.
type filter struct {
	flag, usage string
	of          finder
	set         func(q *query, id string)
}

func inVPC() filter {
	return filter{"vpc", "list only those of this VPC, by name or ID", vpcs(), func(q *query, id string) { q.vpc = id }}
}

func (k *kind[T]) listCommand(s *session.Session, filters ...filter) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "List the " + k.noun + "s", Args: session.Exactly()}
	values := make([]string, len(filters))
	for i, f := range filters {
		refFlag(c, s, &values[i], f.flag, f.usage, f.of)
	}
	flags := k.listed(query{}).AddFlags(s, c)
	var everywhere bool
	if k.everywhere != nil {
		session.AllProjectsFlag(c, &everywhere)
		for _, f := range filters {
			session.Exclusive(c, f.flag, "all-projects")
		}
	}
	c.RunE = run(s, func(ctx context.Context, t *target, _ []string) error {
		if everywhere {
			q := query{}
			q.org, q.project = s.Within()
			return k.inAllProjects().listed(q).List(ctx, s, t.conn, flags)
		}
		q := t.query()
		for i, f := range filters {
			if !c.Flags().Changed(f.flag) {
				continue
			}
			id, err := f.of.find(ctx, t, values[i])
			if err != nil {
				return err
			}
			f.set(&q, id)
		}
		return k.listed(q).List(ctx, s, t.conn, flags)
	})
	return c
}

// inAllProjects returns the kind for lists over all projects. The first column is the tenant.
func (k *kind[T]) inAllProjects() *kind[T] {
	all := *k
	all.page, all.inAll = k.everywhere, true
	all.wide = slices.Concat(k.wide, k.wideInAll)
	all.max = map[string]int{"TENANT": maxTenant}
	maps.Copy(all.max, k.max)
	all.header = slices.Insert(slices.Clone(k.header), 0, "TENANT")
	all.row = func(o T, l *labels) []string {
		tenant := ""
		if p, ok := any(o).(owned); ok {
			tenant = p.GetOrgId() + "/" + p.GetProjectId()
		}
		return slices.Insert(k.row(o, l), 0, tenant)
	}
	return &all
}

// argCommand returns a command whose only argument is an object, with shell completion.
func (k *kind[T]) argCommand(s *session.Session, verb, short string) *cobra.Command {
	return &cobra.Command{
		Use: verb + " " + k.arg, Short: short, Args: session.Exactly(k.arg),
		ValidArgsFunction: session.FirstArg(k.complete(s)),
	}
}

func (k *kind[T]) showCommand(s *session.Session, short string) *cobra.Command {
	c := session.Many(k.argCommand(s, "show", short))
	c.RunE = s.ShowEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		t := newTarget(s, conn)
		o, err := k.read(ctx, t, name)
		if err != nil {
			return err
		}
		return s.Print(o, []string{nameOf(o)}, func(w io.Writer) error { return k.detail(w, s.Now(), o, t.labels(ctx)) })
	})
	return c
}

// read returns the object with a name or ID.
func (k *kind[T]) read(ctx context.Context, t *target, nameOrID string) (T, error) {
	id, err := k.find(ctx, t, nameOrID)
	if err != nil {
		var none T
		return none, err
	}
	return k.get(ctx, t, id)
}

// detail prints an object as lines of name and value, and its lists as tables.
func (k *kind[T]) detail(w io.Writer, now time.Time, o T, l *labels) error {
	at := func(ms int64) string {
		if ms == 0 {
			return ""
		}
		return show.When(ms) + " (" + show.Age(now, ms) + " ago)"
	}
	fields := [][2]string{{"Name", o.GetName()}}
	if i, ok := any(o).(identified); ok {
		fields = append(fields, [2]string{"ID", i.GetId()})
	}
	if p, ok := any(o).(owned); ok {
		fields = append(fields, [2]string{"Tenant", p.GetOrgId() + "/" + p.GetProjectId()})
	}
	fields = append(fields, [2]string{"Description", o.GetDescription()})
	if x, ok := any(o).(stated); ok {
		fields = append(fields, [2]string{"Status", status(x)})
		if x.GetStatusReason() != "" {
			fields = append(fields, [2]string{"Reason", x.GetStatusReason()})
		}
	}
	fields = append(fields, k.fields(o, l)...)
	fields = append(fields, [2]string{"Created", at(o.GetCreatedAt())}, [2]string{"Changed", at(o.GetUpdatedAt())})
	if err := show.Fields(w, fields); err != nil || k.more == nil {
		return err
	}
	return k.more(w, o, l)
}

// table prints an empty line and a table. It prints nothing if the table has no rows.
func table(w io.Writer, header []string, rows [][]string) error {
	if len(rows) == 0 {
		return nil
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return show.Rows(w, header, rows)
}

func (k *kind[T]) deleteCommand(s *session.Session, short string) *cobra.Command {
	c := session.Many(k.argCommand(s, "delete", short))
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, name string) error {
		t := newTarget(s, conn)
		id, err := k.find(ctx, t, name)
		if err != nil {
			return err
		}
		if err := k.remove(ctx, t, id); err != nil {
			return err
		}
		return s.Done(name, "deleted")
	})
	return c
}

func (k *kind[T]) kindName() string { return k.noun }

func status(o stated) string { return show.Enum("STATUS", o.GetStatus()) }
