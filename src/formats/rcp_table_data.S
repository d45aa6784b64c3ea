// The packed reciprocal table as read-only data. NARROWFLOAT_RCP_TABLE is the path of the file that
// tools/pack_rcp_table.py wrote.
    .section .rodata
    .balign 64
    .global narrowfloat_rcp_delta_table
    .hidden narrowfloat_rcp_delta_table
    .type narrowfloat_rcp_delta_table, %object
narrowfloat_rcp_delta_table:
    .incbin NARROWFLOAT_RCP_TABLE
    .size narrowfloat_rcp_delta_table, . - narrowfloat_rcp_delta_table
    .section .note.GNU-stack,"",%progbits
