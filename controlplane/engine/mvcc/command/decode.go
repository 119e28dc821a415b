package command

// programDecoder decodes programs and reuses its memory for the next one.
type programDecoder struct {
	d       FieldDecoder
	program Program
	found   int // steps and compares decoded so far
	nested  int // number of branches around the current step
}

// clear discards the last decoded program, and reuses its slice if it has at most maxReusedItems steps.
func (p *programDecoder) clear() {
	steps := p.program.Steps
	if cap(steps) > maxReusedItems {
		steps = nil
	}
	clear(steps)
	*p = programDecoder{program: Program{Steps: steps[:0]}}
}

// decode decodes b, an encoded program without its format and kind bytes. The program aliases b and is valid until the
// next decode.
func (p *programDecoder) decode(b []byte) (*Program, error) {
	p.clear()
	p.d = FieldDecoder{Rest: b}
	p.program.Epoch = p.d.Int64()
	p.program.Steps = p.steps(p.program.Steps)
	if p.d.Err == nil && len(p.d.Rest) > 0 {
		p.d.Fail()
	}
	return &p.program, p.d.Err
}

// count decodes a number of steps or compares, and enforces MaxProgramSteps.
func (p *programDecoder) count() int {
	n := p.d.Count(MaxProgramSteps)
	if p.found += n; p.found > MaxProgramSteps {
		p.d.Fail()
		return 0
	}
	return n
}

func (p *programDecoder) steps(into []Step) []Step {
	if p.nested > MaxProgramDepth {
		p.d.Fail()
		return nil
	}
	n := p.count()
	if n > cap(into) {
		into = make([]Step, 0, min(n, maxReusedItems))
	}
	for ; n > 0 && p.d.Err == nil; n-- {
		into = append(into, Step{})
		p.step(&into[len(into)-1])
	}
	return into
}

func (p *programDecoder) step(st *Step) {
	d := &p.d
	head := d.Byte()
	st.Kind = StepKind(head & stepKind)
	known := byte(0)
	switch st.Kind {
	case StepPut:
		known = putLease | putPrevKV | putIgnoreValue | putIgnoreLease
		st.PrevKV, st.IgnoreValue, st.IgnoreLease = head&putPrevKV != 0, head&putIgnoreValue != 0, head&putIgnoreLease != 0
		st.Key, st.Value = d.Bytes(MaxKeyBytes), d.Bytes(MaxValueBytes)
		if head&putLease != 0 {
			st.Lease = int64(d.Uint64())
		}
	case StepRange:
		known = spanEnd
		st.Key, st.End = p.span(head)
		st.Range = p.rangeOptions()
	case StepDelete:
		known = spanEnd | deletePrevKV
		st.Key, st.End = p.span(head)
		st.PrevKV = head&deletePrevKV != 0
	case StepBranch:
		p.branch(st)
	case StepGrant:
		st.Lease, st.TTL = int64(d.Uint64()), d.Int64()
	case StepRevoke:
		known = revokeKeys
		st.Lease = int64(d.Uint64())
		if head&revokeKeys != 0 {
			st.Value = d.Take(DigestBytes)
		}
	case StepSetRecord:
		st.Key, st.Value = d.Bytes(MaxKeyBytes), d.Bytes(MaxValueBytes)
	case StepDeleteRecord:
		st.Key = d.Bytes(MaxKeyBytes)
	}
	if head&^(stepKind|known) != 0 || d.Err == nil && st.validate() != nil {
		d.Fail()
	}
}

func (p *programDecoder) branch(st *Step) {
	for n := p.count(); n > 0 && p.d.Err == nil; n-- {
		st.If = append(st.If, p.compare())
	}
	p.nested++
	st.Then = p.steps(nil)
	st.Else = p.steps(nil)
	p.nested--
}

func (p *programDecoder) span(head byte) (key, end []byte) {
	key = p.d.Bytes(MaxKeyBytes)
	if head&spanEnd != 0 {
		if end = p.d.Bytes(MaxKeyBytes + 1); len(end) == 0 {
			p.d.Fail()
		}
	}
	return key, end
}

func (p *programDecoder) rangeOptions() (o RangeOptions) {
	flags := p.d.Byte()
	o.Reverse, o.KeysOnly = flags&rangeReverse != 0, flags&rangeKeysOnly != 0
	o.WantCount, o.CountOnly = flags&rangeWantCount != 0, flags&rangeCountOnly != 0
	number := func(bit byte) int64 {
		if flags&bit == 0 {
			return 0
		}
		v := p.d.Int64()
		if v == 0 {
			p.d.Fail()
		}
		return v
	}
	o.Revision, o.Limit, o.MaxBytes = number(rangeRevision), int(number(rangeLimit)), int(number(rangeMaxBytes))
	const known = rangeReverse | rangeKeysOnly | rangeWantCount | rangeCountOnly | rangeRevision | rangeLimit | rangeMaxBytes
	if flags&^known != 0 {
		p.d.Fail()
	}
	return o
}

func (p *programDecoder) compare() (c Compare) {
	d := &p.d
	head := d.Byte()
	c.Target, c.Relation = CompareTarget(head&7), CompareRelation(head>>compareRelation&7)
	c.Key = d.Bytes(MaxKeyBytes)
	if head&compareEnd != 0 {
		if c.End = d.Bytes(MaxKeyBytes + 1); len(c.End) == 0 {
			d.Fail()
		}
	}
	if c.Target == CompareValue {
		c.Value = d.Bytes(MaxValueBytes)
	} else {
		c.Number = int64(d.Uint64())
	}
	if head&^(7|7<<compareRelation|compareEnd) != 0 || d.Err == nil && c.validate() != nil {
		d.Fail()
	}
	return c
}
