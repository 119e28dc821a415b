package command

import (
	"encoding/binary"
	"fmt"
)

// Limits of a program. They are far above those of the key-value service.
const (
	MaxProgramSteps = 100_000 // steps and compares, in all branches
	MaxProgramDepth = 128     // depth of nested branches
	MaxProgramBytes = MaxTxnBytes
)

// The first byte of an encoded step: its StepKind in the lower four bits, flags in the upper four.
const (
	stepKind = 0x0f

	putLease       = 0x10
	putPrevKV      = 0x20
	putIgnoreValue = 0x40
	putIgnoreLease = 0x80

	spanEnd      = 0x10 // in a StepRange or StepDelete: an End follows the Key
	deletePrevKV = 0x20

	revokeKeys = 0x10

	rangeReverse   = 1 << 0 // first of the flags in the second byte of a StepRange
	rangeKeysOnly  = 1 << 1
	rangeWantCount = 1 << 2
	rangeCountOnly = 1 << 3
	rangeRevision  = 1 << 4
	rangeLimit     = 1 << 5
	rangeMaxBytes  = 1 << 6
)

// The first byte of an encoded compare: target in bits 0 to 2, relation in bits 3 to 5, and compareEnd if an End
// follows.
const (
	compareRelation = 3
	compareEnd      = 0x40
)

// EncodeProgram validates p and returns it as the Data of a Command. A program that puts one key is less than 10 bytes
// longer than the key and value. Errors wrap ErrEmptyKey, ErrTooLarge, ErrTooMany or ErrInvalid.
func EncodeProgram(p Program) ([]byte, error) {
	if p.Epoch < 0 {
		return nil, fmt.Errorf("epoch %d is negative: %w", p.Epoch, ErrInvalid)
	}
	v := validator{}
	if err := v.steps(p.Steps, 0); err != nil {
		return nil, err
	}
	b := make([]byte, 0, v.bytes+2+2*binary.MaxVarintLen64)
	b = append(b, commandFormat, byte(KindProgram))
	b = binary.AppendUvarint(b, uint64(p.Epoch))
	b = appendSteps(b, p.Steps)
	if len(b) > MaxProgramBytes {
		return nil, fmt.Errorf("program of %d bytes, at most %d: %w", len(b), MaxProgramBytes, ErrTooLarge)
	}
	return b, nil
}

// validator checks the limits of a program and estimates its encoded size.
type validator struct{ found, bytes int }

func (v *validator) count(n int) error {
	if v.found += n; v.found > MaxProgramSteps {
		return fmt.Errorf("more than %d steps and compares: %w", MaxProgramSteps, ErrTooMany)
	}
	return nil
}

func (v *validator) steps(steps []Step, depth int) error {
	if depth > MaxProgramDepth {
		return fmt.Errorf("branches more than %d deep: %w", MaxProgramDepth, ErrTooMany)
	}
	if err := v.count(len(steps)); err != nil {
		return err
	}
	for i := range steps {
		st := &steps[i]
		const numbers = 4 + 3*binary.MaxVarintLen64
		v.bytes += numbers + len(st.Key) + len(st.End) + len(st.Value)
		if err := st.validate(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		if err := v.compares(st.If); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		for _, branch := range [][]Step{st.Then, st.Else} {
			if len(branch) == 0 {
				continue
			}
			if err := v.steps(branch, depth+1); err != nil {
				return fmt.Errorf("step %d: %w", i, err)
			}
		}
	}
	return nil
}

func (v *validator) compares(compares []Compare) error {
	if err := v.count(len(compares)); err != nil {
		return err
	}
	for i := range compares {
		c := &compares[i]
		v.bytes += 1 + 4*binary.MaxVarintLen64 + len(c.Key) + len(c.End) + len(c.Value)
		if err := c.validate(); err != nil {
			return fmt.Errorf("compare %d: %w", i, err)
		}
	}
	return nil
}

func (st *Step) validate() error {
	if st.Kind != StepBranch && len(st.If)+len(st.Then)+len(st.Else) > 0 {
		return fmt.Errorf("compares or branches in a step of kind %d: %w", st.Kind, ErrInvalid)
	}
	switch st.Kind {
	case StepRange:
		if o := &st.Range; o.Revision < 0 || o.Limit < 0 || o.MaxBytes < 0 {
			return fmt.Errorf("revision %d, limit %d, bytes %d: %w", o.Revision, o.Limit, o.MaxBytes, ErrInvalid)
		}
		return validateRange(st.Key, st.End)
	case StepDelete:
		return validateRange(st.Key, st.End)
	case StepPut, StepSetRecord, StepDeleteRecord:
		if len(st.End) > 0 {
			return fmt.Errorf("an end for a step on a single key: %w", ErrInvalid)
		}
		if len(st.Value) > MaxValueBytes {
			return fmt.Errorf("value of %d bytes, at most %d: %w", len(st.Value), MaxValueBytes, ErrTooLarge)
		}
		if st.IgnoreValue && len(st.Value) > 0 || st.IgnoreLease && st.Lease != 0 {
			return fmt.Errorf("a value or lease together with keeping the existing one: %w", ErrInvalid)
		}
		return validateRange(st.Key, nil)
	case StepGrant, StepRevoke:
		if st.Lease == 0 || st.TTL < 0 {
			return fmt.Errorf("lease %d of %d s: %w", st.Lease, st.TTL, ErrInvalid)
		}
		if st.Kind == StepRevoke && len(st.Value) != 0 && len(st.Value) != DigestBytes {
			return fmt.Errorf("digest of %d bytes: %w", len(st.Value), ErrInvalid)
		}
		return nil
	case StepBranch:
		return nil
	default:
		return fmt.Errorf("kind %d: %w", st.Kind, ErrInvalid)
	}
}

func (c *Compare) validate() error {
	if c.Target > CompareLease || c.Relation > CompareNotEqual {
		return fmt.Errorf("target %d, relation %d: %w", c.Target, c.Relation, ErrInvalid)
	}
	if len(c.Value) > MaxValueBytes {
		return fmt.Errorf("value of %d bytes, at most %d: %w", len(c.Value), MaxValueBytes, ErrTooLarge)
	}
	return validateRange(c.Key, c.End)
}

func flag(set bool, bit byte) byte {
	if set {
		return bit
	}
	return 0
}

func appendSteps(b []byte, steps []Step) []byte {
	b = binary.AppendUvarint(b, uint64(len(steps)))
	for i := range steps {
		b = steps[i].append(b)
	}
	return b
}

func (st *Step) append(b []byte) []byte {
	head := byte(st.Kind)
	switch st.Kind {
	case StepPut:
		head |= flag(st.Lease != 0, putLease) | flag(st.PrevKV, putPrevKV) |
			flag(st.IgnoreValue, putIgnoreValue) | flag(st.IgnoreLease, putIgnoreLease)
		b = appendBytes(append(b, head), st.Key)
		b = appendBytes(b, st.Value)
		if st.Lease != 0 {
			b = binary.AppendUvarint(b, uint64(st.Lease))
		}
	case StepRange, StepDelete:
		head |= flag(len(st.End) > 0, spanEnd) | flag(st.Kind == StepDelete && st.PrevKV, deletePrevKV)
		b = appendBytes(append(b, head), st.Key)
		if len(st.End) > 0 {
			b = appendBytes(b, st.End)
		}
		if st.Kind == StepRange {
			b = st.Range.append(b)
		}
	case StepBranch:
		b = binary.AppendUvarint(append(b, head), uint64(len(st.If)))
		for i := range st.If {
			b = st.If[i].append(b)
		}
		b = appendSteps(appendSteps(b, st.Then), st.Else)
	case StepGrant:
		b = binary.AppendUvarint(append(b, head), uint64(st.Lease))
		b = binary.AppendUvarint(b, uint64(st.TTL))
	case StepRevoke:
		head |= flag(len(st.Value) > 0, revokeKeys)
		b = binary.AppendUvarint(append(b, head), uint64(st.Lease))
		b = append(b, st.Value...)
	case StepSetRecord:
		b = appendBytes(appendBytes(append(b, head), st.Key), st.Value)
	case StepDeleteRecord:
		b = appendBytes(append(b, head), st.Key)
	}
	return b
}

func (o *RangeOptions) append(b []byte) []byte {
	b = append(b, flag(o.Reverse, rangeReverse)|flag(o.KeysOnly, rangeKeysOnly)|
		flag(o.WantCount, rangeWantCount)|flag(o.CountOnly, rangeCountOnly)|
		flag(o.Revision != 0, rangeRevision)|flag(o.Limit != 0, rangeLimit)|flag(o.MaxBytes != 0, rangeMaxBytes))
	for _, v := range []int64{o.Revision, int64(o.Limit), int64(o.MaxBytes)} {
		if v != 0 {
			b = binary.AppendUvarint(b, uint64(v))
		}
	}
	return b
}

func (c *Compare) append(b []byte) []byte {
	b = append(b, byte(c.Target)|byte(c.Relation)<<compareRelation|flag(len(c.End) > 0, compareEnd))
	b = appendBytes(b, c.Key)
	if len(c.End) > 0 {
		b = appendBytes(b, c.End)
	}
	if c.Target == CompareValue {
		return appendBytes(b, c.Value)
	}
	return binary.AppendUvarint(b, uint64(c.Number))
}
