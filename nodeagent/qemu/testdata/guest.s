# Test guest: a BIOS boot sector. It reads these commands from COM1 and writes its output there:
#  p = trigger pvpanic; o = ACPI power off; s = print without end; w = write sector 1 of disk 0x80 and print W or E;
#  r = reset; z = suspend to RAM (ACPI S3)
# It powers off when the power button is pressed.
	.code16
	.globl _start
_start:
	ljmp $0, $1f
1:	xor %ax,%ax
	mov %ax,%ds
	mov %ax,%es
	mov %ax,%ss
	mov $0x7c00,%sp
	mov %dl,drive
	cld
	# enable the power button's status bit: PM1_EN bit 8
	mov $0x602,%dx
	mov $0x100,%ax
	out %ax,%dx
	mov $hello,%si
	call print
loop:
	mov $0x600,%dx
	in %dx,%ax
	test $1,%ah
	jnz button
	mov $0x3fd,%dx
	in %dx,%al
	test $1,%al
	jz loop
	mov $0x3f8,%dx
	in %dx,%al
	cmp $'p',%al
	je panic
	cmp $'o',%al
	je off
	cmp $'s',%al
	je spew
	cmp $'w',%al
	je write
	cmp $'z',%al
	je sleep
	call putc
	jmp loop
button:
	mov $bye,%si
	call print
off:	mov $0x604,%dx
	mov $0x2000,%ax
	out %ax,%dx
	jmp off
sleep:	mov $0x604,%dx
	mov $0x2400,%ax
	out %ax,%dx
	jmp loop
panic:	mov $0x505,%dx
	mov $1,%al
	out %al,%dx
	jmp loop
write:	mov $0x0301,%ax
	mov $0x0002,%cx
	mov drive,%dl
	xor %dh,%dh
	mov $0x7c00,%bx
	int $0x13
	mov $'W',%al
	jnc 2f
	mov $'E',%al
2:	call putc
	jmp loop
spew:	mov $'0',%bl
3:	mov %bl,%al
	call putc
	inc %bl
	cmp $'z',%bl
	jne 3b
	mov $'\n',%al
	call putc
	jmp spew
print:	lodsb
	or %al,%al
	jz 4f
	call putc
	jmp print
4:	ret
putc:	push %dx
	push %ax
	mov $0x3fd,%dx
5:	in %dx,%al
	test $0x20,%al
	jz 5b
	pop %ax
	mov $0x3f8,%dx
	out %al,%dx
	pop %dx
	ret
hello:	.asciz "GUEST UP\n"
bye:	.asciz "BUTTON\n"
drive:	.byte 0
	.org 510
	.word 0xaa55
